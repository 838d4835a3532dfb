"""Blocks of requests that have left. The simulation checks holders and contents after each transition."""

import numpy as np

from protocol.sampling import SamplingParams
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import Observers
from services.scheduler.core.pins import Pins
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotColumns


def released_prompt(enable_prefix_caching: bool) -> tuple[KVCacheManager, Request, list[int]]:
    """Return a manager after a request has filled all four blocks and left, the request and its blocks."""
    slots = SlotColumns(2, 64)
    kv = KVCacheManager(slots, Limits(2, 64, 64, 4, 4, enable_prefix_caching), Observers(), Pins())
    request = Request(0, 0, np.arange(16, dtype=np.int32), 16, SamplingParams(4), 1)
    slot = slots.assign(request, 64)
    kv.adopt(slot, [])
    rows = np.array([slot])
    missing = kv.missing(rows, np.array([16], np.int32))
    assert missing is not None
    table = kv.grow(rows, missing)
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
