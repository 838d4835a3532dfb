"""Block tables by slot, and the prefix cache over them (spec 0.7).

A block's hash chains over every token before it, the request's salt first, so equal hashes mean equal prefixes.
Blocks enter the cache when the step that writes them is about to be dispatched and their tokens are known (`register`,
eager), or when a result has confirmed them (`commit`). Nothing registers a block before its step is final: the
scheduler chooses first and commits the choice as a whole, so a hit on a block that is never written cannot exist.
"""

from hashlib import sha256

import numpy as np

from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.request import Request
from services.scheduler.core.slots import Column, Rows, SlotTable


class KVCacheManager:
    def __init__(
        self, slots: SlotTable, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.queries = 0
        """Tokens looked up in the prefix cache."""
        self.hits = 0
        """Tokens found there."""
        self._slots = slots
        self.tables: list[list[int]] = [[] for _ in range(slots.num_slots)]

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that already hold the request's longest cached prefix; the last token is always recomputed, because
        its logits are needed."""
        if not (self.enable_prefix_caching and request.reads_prefix_cache):
            return []
        tokens = request.token_ids
        most = (len(tokens) - 1) // self.block_size
        self._extend_hashes(request, tokens, most)
        blocks = []
        for block_hash in request.block_hashes[:most]:
            block = self.pool.by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_admit(self, prefix: list[int], num_tokens: int) -> bool:
        """Whether `prefix` can be held and the rest of `num_tokens` be allocated."""
        unheld = sum(self.pool.is_free(block) for block in prefix)
        return self.blocks_for(num_tokens) - len(prefix) <= self.pool.num_free - unheld

    def adopt(self, slot: int, prefix: list[int]) -> None:
        """Starts the slot's table with cached blocks."""
        self.pool.hold(prefix)
        self.tables[slot] = list(prefix)
        covered = len(prefix) * self.block_size
        self._slots.capacity[slot] = covered
        self._slots.next_commit[slot] = covered + self.block_size

    def missing(self, slots: Rows, num_tokens: Column) -> Column:
        """Blocks that each slot lacks to hold `num_tokens` tokens; int32[rows]."""
        lacking = num_tokens - self._slots.capacity.take(slots)
        np.maximum(lacking, 0, out=lacking)
        if lacking.any():
            lacking += self.block_size - 1
            lacking //= self.block_size
        return lacking

    def grow(self, rows: Rows, counts: Column) -> list[int]:
        """Appends `counts[i]` fresh blocks to the table of `rows[i]`; the caller has checked that they exist. Returns
        the blocks, row after row."""
        blocks = self.pool.take(int(counts.sum()))
        self._slots.capacity[rows] += counts * self.block_size
        at = 0
        for slot, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self.tables[slot] += blocks[at : at + count]
            at += count
        return blocks

    def register(self, rows: Rows, frontiers: Column) -> None:
        """The first `frontiers[i]` tokens of `rows[i]` are known, and written or ordered before any reader: their full
        blocks may be shared from now on. Only rows that crossed a block boundary cost anything."""
        crossed = frontiers >= self._slots.next_commit.take(rows)
        if not (self.enable_prefix_caching and crossed.any()):
            return
        rows, size, owner, register = rows[crossed], self.block_size, self._slots.owner, self.pool.register
        lasts = frontiers[crossed] // size
        firsts = self._slots.next_commit[rows] // size - 1
        self._slots.next_commit[rows] = (lasts + 1) * size
        newest = self._slots.history[rows[:, None], (lasts * size)[:, None] + np.arange(-size, 0)].tobytes()
        width, at = 4 * size, 0
        for slot, first, last in zip(rows.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            request, table = owner[slot], self.tables[slot]
            if request is None:
                raise KeyError(f"slot {slot} is free")
            hashes = request.block_hashes
            if len(hashes) == last - 1 and hashes:  # the usual case: a decode filled one more block
                hashes.append(sha256(hashes[-1] + newest[at : at + width]).digest())
            elif len(hashes) < last:
                self._extend_hashes(request, self._slots.history[slot], last)
            for index in range(first, last):
                register(table[index], hashes[index])
            at += width

    def commit(self, rows: Rows) -> None:
        """Registers what results have confirmed; not what a request that ends within a row had more."""
        self.register(rows, np.minimum(self._slots.committed(rows), self._slots.tokens.take(rows)))

    def release(self, slot: int) -> None:
        """Frees the slot's blocks; no step in flight may write them any more (S1-10)."""
        self.pool.give_back(reversed(self.tables[slot]))
        self.tables[slot] = []

    def _extend_hashes(self, request: Request, tokens: Column, num_blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        parent = hashes[-1] if hashes else sha256(request.cache_salt.encode()).digest()
        first = len(hashes)
        data = tokens[first * size : num_blocks * size].tobytes()
        for at in range(0, (num_blocks - first) * size * tokens.itemsize, size * tokens.itemsize):
            parent = sha256(parent + data[at : at + size * tokens.itemsize]).digest()
            hashes.append(parent)
