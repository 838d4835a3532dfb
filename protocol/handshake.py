"""The first message on every connection, both ways. It never changes shape, so that any two versions can refuse each other."""

import msgspec

PROTOCOL_VERSION = (1, 0)
"""(major, minor): majors must be equal; a minor only appends fields with defaults."""


class Hello(msgspec.Struct, array_like=True, frozen=True, tag="hello"):
    """Sent by the side that connects."""

    major: int
    minor: int
    role: str
    """"frontend", "worker" (plans and membership) or "worker-results" (the worker's output thread)."""
    name: str = ""
    """For people: shows up in logs and errors."""


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag="welcome"):
    major: int
    minor: int


class Refused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """The connection is not wanted; `reason` names both values. The peer exits, it does not retry."""

    reason: str


def check_version(hello: Hello) -> str | None:
    """Why this peer cannot be spoken to (both versions named), or None."""
    ours = "{}.{}".format(*PROTOCOL_VERSION)
    if hello.major != PROTOCOL_VERSION[0]:
        return f"protocol version mismatch: {hello.role} {hello.name!r} speaks {hello.major}.{hello.minor}, this service {ours}"
    return None
