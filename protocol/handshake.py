"""Handshake: the first message in each direction of a connection.

These messages never change, so that any two versions can refuse each other.
"""

import msgspec

from protocol.fields import Count, Name, Text

PROTOCOL_VERSION = (3, 0)
"""(major, minor). Majors must be equal; a new minor only appends fields with defaults."""
PROBE = "probe"
"""Role of health checks. Every server answers it and keeps no peer."""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """First message of the side that connects."""

    major: Count
    minor: Count
    role: Name
    """"frontend", "worker" (plans and membership), "worker-results" (the worker's output thread) or "probe"."""
    name: Name = ""
    """Name of the peer in logs and errors."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    """Answer to a `Hello` that is accepted, with the version of the server."""

    major: Count
    minor: Count


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The server refuses the connection. The peer exits and does not retry.

    The message may also arrive later, in place of any other.
    """

    reason: Text
    """Names what does not match, with the values of both sides."""


def check_version(hello: Hello) -> str | None:
    """Return the reason to refuse the peer, with both versions, or None."""
    ours = "{}.{}".format(*PROTOCOL_VERSION)
    if hello.major != PROTOCOL_VERSION[0]:
        theirs = f"{hello.major}.{hello.minor}"
        return f"protocol version mismatch: {hello.role!r} {hello.name!r} has {theirs}, this service has {ours}"
    return None
