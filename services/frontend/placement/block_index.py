"""Index of what engines hold in their prefix caches, approximate and in bounded memory.

One map has, by the name of a block, the engines that hold it, as bits of an integer. Names chain over all tokens before
them and begin with the salt, so to find a name is to find the whole prefix, under the same salt only (salted index,
docs/invariants.md). An engine whose cache was emptied gets another bit, so that no entry has to be searched for the
one before.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from services.frontend.placement.generations import TwoGenerations


class BlockIndex:
    """Engines are known by small integers."""

    def __init__(self, size: int) -> None:
        """`size`: names that are kept at least, after their last use; twice as many at most."""
        self._holders: TwoGenerations[int] = TwoGenerations(size)
        self._bit_of: dict[int, int] = {}
        self._engine_of = np.zeros(0, np.int64)
        """Engine of a bit position; undefined if its bit is not live."""
        self._live = 0
        """Bits of engines."""
        self._retired: list[tuple[int, int]] = []
        """Bits that entries may still have, and the rotation after which none has: entries lose them when they become
        young again."""

    @property
    def num_stored(self) -> int:
        """Names that are stored; some are counted twice."""
        return self._holders.num_stored

    def add(self, engine: int, names: Iterable[bytes]) -> None:
        """An engine holds these blocks."""
        if (bit := self._bit_of.get(engine)) is None:
            bit = self._new_bit(engine)
        added, live = dict.fromkeys(names, bit), self._live
        for generation in (self._holders.old, self._holders.young):
            for name in generation.keys() & added.keys():
                added[name] |= generation[name] & live
        self._holders.young.update(added)
        self._holders.rotate_if_full()

    def remove(self, engine: int, names: Iterable[bytes]) -> None:
        """An engine no longer holds these blocks."""
        mask = ~self._bit_of.get(engine, 0)
        for generation in (self._holders.young, self._holders.old):
            for name in names:
                if (holders := generation.get(name)) is not None:
                    if holders := holders & mask:
                        generation[name] = holders
                    else:
                        del generation[name]

    def clear(self, engine: int) -> None:
        """An engine holds no block."""
        if (bit := self._bit_of.pop(engine, None)) is None:
            return
        self._live &= ~bit
        self._retired.append((bit, self._holders.rotations + 2))
        if len(self._retired) > 16 + 2 * len(self._bit_of):  # masks stay short, even if nothing is added
            self._holders.rotate()

    def holders(self, names: Sequence[bytes]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Iterate over the engines that hold the first of these names, in groups by how many of them in a row.

        Yields: (number of names, engines that hold so many and no more)
        """
        mask = live = self._live
        young, old = self._holders.young, self._holders.old
        for count, name in enumerate(names):
            if (held := young.get(name, 0)) == 0 and (held := old.get(name, 0) & live):
                young[name] = held
            if (held := held & mask) != mask:
                if count:
                    yield count, self._engines(mask & ~held)
                mask = held
                if not mask:
                    return
        if names and mask:
            yield len(names), self._engines(mask)

    def _engines(self, mask: int) -> NDArray[np.int64]:
        if mask & (mask - 1) == 0:  # one engine
            return self._engine_of[mask.bit_length() - 1 : mask.bit_length()]
        data = np.frombuffer(mask.to_bytes(len(self._engine_of) // 8 + 1, "little"), np.uint8)
        return self._engine_of[np.unpackbits(data, bitorder="little").nonzero()[0]]

    def _new_bit(self, engine: int) -> int:
        if self._retired and self._retired[0][1] <= self._holders.rotations:
            bit = self._retired.pop(0)[0]
            self._engine_of[bit.bit_length() - 1] = engine
        else:
            bit = 1 << len(self._engine_of)
            self._engine_of = np.append(self._engine_of, engine)
        self._bit_of[engine] = bit
        self._live |= bit
        return bit
