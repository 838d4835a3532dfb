"""A bounded map that drops what was not used for long."""

from typing import Generic, TypeVar

V = TypeVar("V")


class TwoGenerations(Generic[V]):
    """Values by name, in two generations: an entry that is read or written enters the young one. When that is full, it
    becomes the old one, and the entries of the old one that were not used meanwhile are dropped.

    So an entry outlives at least `size` later uses of others. Nothing is written in order of use, which makes reads
    and bulk writes as cheap as those of a dict.
    """

    def __init__(self, size: int) -> None:
        """`size`: entries of one generation; at most twice as many are kept, and those of one bulk write."""
        self._size = size
        self.young: dict[bytes, V] = {}
        self.old: dict[bytes, V] = {}
        """May have outdated values of entries that are also in `young`."""
        self.rotations = 0

    @property
    def num_stored(self) -> int:
        """Entries of both generations; those in both are counted twice."""
        return len(self.young) + len(self.old)

    def get(self, name: bytes) -> V | None:
        """Return a value, and count that as a use."""
        if (value := self.young.get(name)) is None and (value := self.old.get(name)) is not None:
            self.young[name] = value
        return value

    def rotate(self) -> None:
        self.old, self.young = self.young, {}
        self.rotations += 1

    def rotate_if_full(self) -> None:
        """Call it after writes to `young`."""
        if len(self.young) >= self._size:
            self.rotate()
