"""KV blocks: reference counts, cached blocks by hash, free blocks.

A free block is *blank* (its content is worthless) or *cached* (it can be found by its hash until it is evicted). Blank
blocks are taken first, then cached ones, least recently freed first.
"""

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Blocks 0 .. num_blocks - 1. `refs[b] == 0` exactly while b is free; only free blocks are evicted."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        """The last entry is that of NO_BLOCK, which has none."""
        self.by_hash: dict[bytes, int] = {}
        self.whole = bytearray(num_blocks + 1)
        """1: confirmed steps have written the block under its present hash."""
        self.named: list[int] = []
        """Blocks that were registered since the list was taken. Some may have lost their hash."""
        self.blank = list(range(num_blocks - 1, -1, -1))
        """Free blocks without a hash; the last one is taken first."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with a hash; the first one is evicted first."""

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached)

    def take(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder and no hash; the caller has checked that they exist."""
        blank = min(count, len(self.blank))
        blocks = self.blank[len(self.blank) - blank :]
        del self.blank[len(self.blank) - blank :]
        for _ in range(count - blank):
            block, _ = self.cached.popitem(last=False)
            self.forget(block)
            blocks.append(block)
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block: a prefix hit."""
        for block in blocks:
            if self.refs[block] == 0:
                del self.cached[block]
            self.refs[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. Pass tail blocks first, so that prefixes are evicted last."""
        for block in blocks:
            self.refs[block] -= 1
            if self.refs[block] == 0:
                if self.hash_of[block] is None:
                    self.blank.append(block)
                else:
                    self.cached[block] = None

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a held block findable. The first block under a hash stays; another one is not cached."""
        if self.hash_of[block] is None and block_hash not in self.by_hash:
            self.by_hash[block_hash] = block
            self.hash_of[block] = block_hash
            self.named.append(block)

    def forget(self, block: int) -> None:
        """Remove the block from the prefix cache, because its content is about to change."""
        block_hash = self.hash_of[block]
        if block_hash is not None:
            del self.by_hash[block_hash]
            self.hash_of[block] = None
            self.whole[block] = 0

    def drop(self, block: int) -> None:
        """Remove the block from the prefix cache, and free it unless it is held."""
        self.forget(block)
        if self.refs[block] == 0:
            del self.cached[block]
            self.blank.append(block)

    def forget_all(self) -> None:
        """Empty the prefix cache; held blocks stay with their holders."""
        self.by_hash.clear()
        self.hash_of = [None] * (self.num_blocks + 1)
        self.whole = bytearray(self.num_blocks + 1)
        self.blank.extend(self.cached)
        self.cached.clear()

    def adopt(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Fill the cache of a pool without holders with whole blocks and their hashes; those that became whole last are
        evicted first, so that prefixes stay longest. A second block under a hash stays blank."""
        for block, block_hash in blocks:
            if 0 <= block < self.num_blocks:
                self.register(block, block_hash)
                self.whole[block] = self.hash_of[block] is not None
        self.cached = OrderedDict.fromkeys(reversed(self.by_hash.values()))
        self.blank = [block for block in self.blank if block not in self.cached]
