"""KV blocks: who holds them, which of them are cached under a hash, which are free.

A free block is *blank* (content worthless) or *cached* (found again by its hash until it is evicted). Blank blocks
are given away first, then cached ones, least recently freed first.
"""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Blocks 0 .. num_blocks - 1. `refs[b] == 0` exactly while b is free; only free blocks are evicted (spec 0.7)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.by_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def is_free(self, block: int) -> bool:
        return self.refs[block] == 0

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each now held once and without a hash; the caller has checked that they exist."""
        blank = min(count, len(self._blank))
        blocks = self._blank[len(self._blank) - blank :]
        del self._blank[len(self._blank) - blank :]
        for _ in range(count - blank):
            block, _ = self._cached.popitem(last=False)
            self.forget(block)
            blocks.append(block)
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each block: a prefix hit."""
        for block in blocks:
            if self.refs[block] == 0:
                del self._cached[block]
            self.refs[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One holder less for each block. Pass tail blocks first, so that prefixes survive longest."""
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if self.hash_of[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Makes a held block findable. The first block under a hash stays; a twin simply is not cached."""
        if self.hash_of[block] is None and block_hash not in self.by_hash:
            self.by_hash[block_hash] = block
            self.hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """The block's content is about to change."""
        block_hash = self.hash_of[block]
        if block_hash is not None:
            del self.by_hash[block_hash]
            self.hash_of[block] = None

    def forget_all(self) -> None:
        """Empties the prefix cache; held blocks stay with their holders."""
        self.by_hash.clear()
        self.hash_of = [None] * self.num_blocks
        self._blank.extend(self._cached)
        self._cached.clear()
