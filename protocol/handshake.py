"""The first message on every connection, both ways.

It never changes shape, so that any two versions can refuse each other.
"""

import msgspec

from protocol.fields import Count, Name, Text

PROTOCOL_VERSION = (2, 0)
"""(major, minor): majors must be equal; a minor only appends fields with defaults."""
PROBE = "probe"
"""The role of health checks: any server answers, and remembers nothing."""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """Sent by the side that connects."""

    major: Count
    minor: Count
    role: Name
    """"frontend", "worker" (plans and membership) or "worker-results" (the worker's output thread) or "probe"."""
    name: Name = ""
    """For people: shows up in logs and errors."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    major: Count
    minor: Count


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The connection is not wanted; `reason` names both values. The peer exits, it does not retry.

    May also come later, in place of any message."""

    reason: Text


def check_version(hello: Hello) -> str | None:
    """Why this peer cannot be spoken to (both versions named), or None."""
    ours = "{}.{}".format(*PROTOCOL_VERSION)
    if hello.major != PROTOCOL_VERSION[0]:
        theirs = f"{hello.major}.{hello.minor}"
        return (
            f"protocol version mismatch: {hello.role!r} {hello.name!r} speaks {theirs}, this service {ours}"
        )
    return None
