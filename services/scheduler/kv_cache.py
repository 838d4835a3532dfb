"""Block tables by slot, and the prefix cache over them (spec 0.7).

A block's hash chains over every token before it, the request's salt first, so equal hashes mean equal prefixes.
Blocks enter the cache when the step that writes them is about to be dispatched and their tokens are known (`register`,
eager), or when a result has confirmed them (`commit`). Nothing registers a block before its step is final: the
scheduler chooses first and commits the choice as a whole, so a hit on a block that is never written cannot exist.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from services.scheduler.block_pool import BlockPool
from services.scheduler.request import Request
from services.scheduler.slots import SlotTable


class KVCacheManager:
    def __init__(self, slots: SlotTable, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
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
        if not self.enable_prefix_caching:
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

    def missing(self, slots: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """Blocks that each slot lacks to hold `num_tokens` tokens; int32[rows]."""
        lacking = num_tokens - self._slots.capacity[slots]
        return np.maximum(-(-lacking // self.block_size), 0)

    def grow(self, slot: int, count: int) -> list[int]:
        """Appends `count` fresh blocks to the slot's table; the caller has checked that they exist."""
        fresh = [self.pool.take() for _ in range(count)]
        self.tables[slot] += fresh
        self._slots.capacity[slot] += count * self.block_size
        return fresh

    def register(self, slot: int, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the slot are known and written, or ordered before any reader: their full
        blocks may be shared from now on."""
        if not self.enable_prefix_caching:
            return
        slots = self._slots
        first, last = int(slots.next_commit[slot]) // self.block_size - 1, num_tokens // self.block_size
        request, table, register = slots.request(slot), self.tables[slot], self.pool.register
        self._extend_hashes(request, slots.history[slot], last)
        for index in range(first, last):
            register(table[index], request.block_hashes[index])
        slots.next_commit[slot] = (max(first, last) + 1) * self.block_size

    def commit(self, slots: NDArray[np.int32]) -> None:
        """Registers what results have confirmed: only slots that crossed a block boundary cost anything."""
        committed = self._slots.committed(slots)
        crossed = committed >= self._slots.next_commit[slots]
        if self.enable_prefix_caching and crossed.any():
            for slot, frontier in zip(slots[crossed].tolist(), committed[crossed].tolist(), strict=True):
                self.register(slot, frontier)

    def release(self, slot: int) -> None:
        """Frees the slot's blocks; no step in flight may write them any more (S1-10)."""
        self.pool.give_back(reversed(self.tables[slot]))
        self.tables[slot] = []

    def _extend_hashes(self, request: Request, tokens: NDArray[np.int32], num_blocks: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        for index in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else hashlib.sha256(request.cache_salt.encode()).digest()
            block = tokens[index * size : (index + 1) * size]
            hashes.append(hashlib.sha256(parent + block.tobytes()).digest())
