"""BlockPool and KVCacheManager as a state machine, against a model with every holder and every content."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from protocol.sampling import SamplingParams
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import Observers
from services.scheduler.core.pins import Pins
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotColumns

NUM_SLOTS, NUM_BLOCKS, SIZE, LONGEST = 6, 11, 3, 24
Key = tuple[str, tuple[int, ...]]
"""(salt, tokens up to the end of the block)"""


class KVCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotColumns(NUM_SLOTS, LONGEST)
        limits = Limits(NUM_SLOTS, LONGEST, LONGEST, NUM_BLOCKS, SIZE)
        self.kv = KVCacheManager(self.slots, limits, Observers(), Pins())
        self.content: dict[int, Key] = {}
        """Block -> content that was registered last; removed when the block is given away."""
        self.arrivals = 0
        self.held: list[list[int]] = []

    live = Bundle("live")

    @precondition(lambda self: len(self.slots.free) > 0)
    @rule(
        target=live,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST - 1),
        salt=st.sampled_from(["", "a"]),
    )
    def admit(self, tokens: list[int], salt: str) -> Request | None:
        self.arrivals += 1
        array = np.array(tokens, np.int32)
        request = Request(0, self.arrivals, array, len(tokens), SamplingParams(4), self.arrivals, salt)
        prefix = self.kv.find_prefix(request)
        self._check_prefix(prefix, tokens, salt)
        if self.kv.num_missing(prefix, len(tokens)) > self.kv.num_free:
            return None
        slot = self.slots.assign(request, LONGEST)
        self.kv.adopt(slot, prefix)
        self._grow(slot, len(tokens))
        assert len(self.kv.tables[slot]) == -(-len(tokens) // SIZE)
        return request

    def _check_prefix(self, prefix: list[int], tokens: list[int], salt: str) -> None:
        """Every hit holds exactly these tokens under this salt, and the next block is not cached."""
        assert len(prefix) * SIZE < len(tokens), "the last token is always recomputed"
        for index, block in enumerate(prefix):
            assert self.content[block] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        following = (salt, tuple(tokens[: (len(prefix) + 1) * SIZE]))
        if (len(prefix) + 1) * SIZE < len(tokens):
            cached = {self.content[block] for block in self.kv.pool.by_hash.values()}
            assert following not in cached, "a longer prefix was cached"

    def _grow(self, slot: int, total: int) -> None:
        row = np.array([slot], np.int64)
        for block in self.kv.grow(row, self.kv.missing(row, np.array([total], np.int32))):
            self.content.pop(block, None)

    @rule(request=live, count=st.integers(1, 6))
    def append_and_grow(self, request: Request | None, count: int) -> None:
        if request is None or request.slot < 0:
            return
        slot, total = request.slot, int(self.slots.tokens[request.slot])
        count = min(count, LONGEST - total)
        missing = self.kv.missing(np.array([slot]), np.array([total + count], np.int32))
        if count and int(missing.sum()) <= self.kv.pool.num_free:
            self._grow(slot, total + count)
            self.slots.history[slot, total : total + count] = count % 2
            self.slots.tokens[slot] = total + count

    @rule(request=live, share=st.floats(0, 1))
    def register(self, request: Request | None, share: float) -> None:
        if request is None or request.slot < 0:
            return
        slot = request.slot
        frontier = int(share * int(self.slots.tokens[slot]))
        before = dict(self.kv.pool.by_hash)
        self.kv.register(np.array([slot]), np.array([frontier], np.int32))
        tokens = tuple(self.slots.history[slot, :frontier].tolist())
        for block_hash, block in self.kv.pool.by_hash.items():
            if block_hash not in before:
                index = self.kv.tables[slot].index(block)
                assert (index + 1) * SIZE <= frontier
                self.content[block] = (request.cache_salt, tokens[: (index + 1) * SIZE])

    @rule(request=consumes(live))
    def leave(self, request: Request | None) -> None:
        if request is not None and request.slot >= 0:
            slot = request.slot
            self.slots.retire(slot, 3)
            self.kv.release(slot)
            self.slots.release(slot)

    @rule(pick=st.integers(0, NUM_BLOCKS - 1))
    def hold(self, pick: int) -> None:
        """Hold a cached block for another request."""
        blocks = list(self.kv.pool.by_hash.values())
        if blocks:
            held = [blocks[pick % len(blocks)]]
            self.kv.pool.hold(held)
            self.held.append(held)

    @precondition(lambda self: self.held)
    @rule()
    def give_back(self) -> None:
        self.kv.pool.give_back(self.held.pop())

    @precondition(lambda self: self.kv.pool.num_free > 0)
    @rule()
    def evict_by_taking_everything(self) -> None:
        blocks = self.kv.pool.take(self.kv.pool.num_free)
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert self.kv.pool.hash_of[block] is None
            self.content.pop(block, None)
        self.kv.pool.give_back(blocks)

    @rule()
    def forget_all(self) -> None:
        self.kv.pool.forget_all()
        self.content.clear()

    @invariant()
    def every_reference_has_a_holder(self) -> None:
        holders = Counter(block for table in (*self.kv.tables, *self.held) for block in table)
        assert self.kv.pool.refs == [holders[block] for block in range(NUM_BLOCKS)]

    @invariant()
    def free_blocks_are_blank_or_cached_never_both(self) -> None:
        pool = self.kv.pool
        blank, cached = list(pool.blank), list(pool.cached)
        assert sorted(blank + cached) == [block for block in range(NUM_BLOCKS) if pool.refs[block] == 0]
        assert all(pool.hash_of[block] is None for block in blank)
        assert all(pool.hash_of[block] is not None for block in cached)
        assert pool.num_free == len(blank) + len(cached)

    @invariant()
    def the_hash_map_is_a_bijection_of_equal_contents(self) -> None:
        pool = self.kv.pool
        assert {pool.hash_of[block]: block for block in pool.by_hash.values()} == pool.by_hash
        assert sum(x is not None for x in pool.hash_of) == len(pool.by_hash)
        contents = [self.content[block] for block in pool.by_hash.values()]
        assert len(set(contents)) == len(contents), "two hashes of one content"


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(max_examples=150, stateful_step_count=40, derandomize=True)


def released_prompt(enable_prefix_caching: bool) -> tuple[KVCacheManager, Request, list[int]]:
    """Return a manager after a request has filled all four blocks and left, the request and its blocks."""
    slots = SlotColumns(2, 64)
    kv = KVCacheManager(slots, Limits(2, 64, 64, 4, 4, enable_prefix_caching), Observers(), Pins())
    request = Request(0, 0, np.arange(16, dtype=np.int32), 16, SamplingParams(4), 1)
    slot = slots.assign(request, 64)
    kv.adopt(slot, [])
    rows = np.array([slot])
    table = kv.grow(rows, kv.missing(rows, np.array([16], np.int32)))
    kv.register(rows, np.array([16], np.int32))
    kv.release(slot)
    return kv, request, table


def test_tail_blocks_are_evicted_before_the_prefix_they_extend() -> None:
    kv, _, table = released_prompt(enable_prefix_caching=True)
    assert kv.pool.take(2) == [table[3], table[2]]
    assert list(kv.pool.by_hash.values()) == table[:2]


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    kv, request, _ = released_prompt(enable_prefix_caching=False)
    assert (kv.pool.by_hash, kv.find_prefix(request), kv.pool.num_free) == ({}, [], 4)
