"""Names of blocks that have come to a tier and left it, for KV events."""

from collections import deque
from contextlib import suppress

MAX_NAMES = 4096
"""Maximum number of names in one report; the newest ones."""


class TierChanges:
    """Two threads may add to it, while a third one takes."""

    def __init__(self) -> None:
        self.stored = deque[bytes](maxlen=MAX_NAMES)
        self.removed = deque[bytes](maxlen=MAX_NAMES)

    def take(self) -> tuple[bytes, bytes]:
        """Return the names since the last call, uint8[names, NAME_BYTES] each: stored, removed."""
        return _drained(self.stored), _drained(self.removed)


def _drained(names: deque[bytes]) -> bytes:
    taken: list[bytes] = []
    with suppress(IndexError):
        while len(taken) < MAX_NAMES:
            taken.append(names.popleft())
    return b"".join(taken)
