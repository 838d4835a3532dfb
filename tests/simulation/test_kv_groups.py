"""Groups of KV cache: a block table per group, memory behind windows, and prefixes that every group can serve."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocol.codec import encode
from protocol.kv_groups import NO_BLOCK, KVGroup, name_in_group
from protocol.membership import Loaded
from services.config import SchedulerConfig
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.membership.sizes import fit
from services.scheduler.policies import BalancedPolicy, ChunkedPolicy, SchedulerView
from tests.simulation.drafts import Speculating
from tests.simulation.faults import Fault, FaultList, assert_caught, parameters
from tests.simulation.invariants import Checker
from tests.simulation.test_acceptance import DEPTHS
from tests.simulation.world import World, params, prompt_of

FULL, WINDOW = KVGroup(), KVGroup("sliding_window", 10)
LIMITS = Limits(4, 8, 128, 96, 4, groups=(FULL, WINDOW, WINDOW))


def held(world: World, slot: int, group: int) -> list[int]:
    """Indices of the positions at which a slot's table has a block of the group."""
    table = world.epoch.kv.tables[slot][group :: len(world.limits.groups)]
    return [index for index, block in enumerate(table) if block != NO_BLOCK]


def request_of(tokens: list[int]) -> Request:
    return Request(0, 9, np.array(tokens, np.int32), len(tokens), params(1), 9)


def evict(world: World, block: int) -> None:
    pool = world.epoch.kv.pool
    pool.forget(block)
    del pool.cached[block]
    pool.blank.append(block)


@pytest.mark.parametrize("depth", DEPTHS)
def test_memory_behind_a_window_is_free(depth: int) -> None:
    """A sequence of 100 tokens holds all blocks of full attention, and of a window of 10 a few and those of steps
    in flight, while it runs; the free ones serve another request at the same time."""
    world = World(LIMITS, depth)
    world.add(prompt_of(60), params(40, eos=False))
    most = 0
    while world.engine.has_requests:
        world.step()
        most = max(most, len(held(world, 0, 1)), len(held(world, 0, 2)))
        if (tokens := int(world.epoch.slots.tokens[0])) == 90:
            assert held(world, 0, 0)[:20] == [*range(20)]
            assert held(world, 0, 1)[0] == (tokens - 10) // 4
    assert 3 <= most <= 4 + 2 * depth
    world.drain()


def test_requests_run_together_that_only_fit_without_what_windows_hide() -> None:
    world = World(replace(LIMITS, num_blocks=72), 2)
    for number in range(2):  # 2 * 3 * 24 blocks with full attention in every layer
        world.add(prompt_of(64, number), params(30, eos=False))
    world.drain()
    assert world.store.counters["num_preemptions"] == 0


def test_a_prompt_enters_that_only_fits_without_what_windows_hide() -> None:
    """`balanced` plans by the prompts that could enter."""
    limits = Limits(4, 8, 72, 38, 4, stages=2, groups=(FULL, WINDOW, WINDOW))  # 3 * 15 blocks without windows
    world = World(limits, 2, policy=BalancedPolicy())
    world.add(prompt_of(59), params(2, eos=False))
    world.drain()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_drafter_has_room_behind_the_chunks_of_a_window(depth: int) -> None:
    """A request that fits without the drafter's positions stays preempted for ever."""
    limits = Limits(4, 8, 64, 1, 4, lookahead=5, groups=(KVGroup("sliding_window", 8),))
    least = next(blocks for blocks in range(1, 64) if replace(limits, num_blocks=blocks).kv_capacity >= 64)
    speculating = Speculating("never", (limits.lookahead,), looks_ahead=True)
    world = World(replace(limits, num_blocks=least), depth, speculating=speculating)
    stream = world.add(prompt_of(40), params(6, eos=False))
    world.drain()
    assert len(stream.tokens) == 6


def test_the_context_leaves_room_for_the_drafter_of_a_model_with_windows() -> None:
    speculation = {"method": "eagle", "num_speculative_tokens": 5}
    config = SchedulerConfig(max_num_batched_tokens=48, block_size=16, speculative_config=json.dumps(speculation))
    for num_blocks in range(2, 32):
        loaded = Loaded("model", 64, 256, 1, num_blocks, groups=(FULL, KVGroup("sliding_window", 33)))
        limits = fit(config, [loaded])
        assert limits.max_model_len <= limits.kv_capacity


def test_a_prefix_is_a_hit_without_the_blocks_behind_its_window() -> None:
    world = World(LIMITS, 2)
    world.add(prompt_of(60), params(1, eos=False))
    world.drain()
    kv = world.epoch.kv
    assert len(kv.pool.by_hash) == 3 * 15
    table = kv.find_prefix(request_of([*prompt_of(60), 1]))
    assert [block == NO_BLOCK for block in table[1::3]] == [True] * 12 + [False] * 3
    assert all(block != NO_BLOCK for block in table[::3])


def test_a_missing_block_of_one_group_shortens_the_prefix_for_all() -> None:
    world = World(LIMITS, 2)
    world.add(prompt_of(60), params(1, eos=False))
    world.drain()
    kv, request = world.epoch.kv, request_of([*prompt_of(60), 1])
    table = kv.find_prefix(request)
    evict(world, table[13 * 3 + 2])  # block 13 of the second window
    shorter = kv.find_prefix(request)
    assert kv.covered(shorter) == 13 * 4
    assert [block == NO_BLOCK for block in shorter[2::3]] == [True] * 10 + [False] * 3
    evict(world, table[0])
    assert kv.find_prefix(request) == []


class ShorteningPolicy(ChunkedPolicy):
    """Takes 8 tokens less than a hit has."""

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        return max(0, hit - 8), count


@pytest.mark.parametrize(("lost", "start"), [(None, 48), (12, 40), (10, 0), (9, 0), (8, 48)])
def test_a_hit_that_a_policy_shortens_is_one_that_every_group_can_serve(lost: int | None, start: int) -> None:
    """A hit of 14 blocks, whose window begins in block 11, becomes one of 12, whose window begins in block 9. With a
    block of that one missing, there is none."""
    world = World(LIMITS, 2, policy=ShorteningPolicy())
    world.add(prompt_of(56), params(1, eos=False))
    world.drain()
    if lost is not None:
        names = world.epoch.kv.pool.by_hash
        request = request_of([*prompt_of(56), 1])
        world.epoch.kv.find_prefix(request)
        evict(world, names[name_in_group(request.block_hashes[lost], 1)])
    stream = world.add([*prompt_of(56), 1], params(5, eos=False))
    world.drain()
    assert stream.hit == start


def test_a_window_as_long_as_the_context_decides_as_full_attention() -> None:
    """The same plans, byte for byte."""

    def plans(groups: tuple[KVGroup, ...]) -> list[bytes]:
        world = World(Limits(3, 16, 64, 24, 4, groups=groups), 2)
        for number in range(6):
            world.add(prompt_of(20, number % 2), params(20, eos=False))
        world.drain()
        assert world.store.counters["num_preemptions"] > 0
        return [encode(plan) for plan in world.plans]

    assert plans((KVGroup(),)) == plans((KVGroup("sliding_window", 64),))


FAULTS = FaultList()


@FAULTS.add(KVCacheManager, "free_unread")
def freed_one_step_too_early(free: Any, self: KVCacheManager, rows: Any, committed: Any) -> None:
    """The positions of steps in flight count as committed."""
    free(self, rows, self._slots.computed[rows])


@FAULTS.add(KVCacheManager, "free_unread")
def freed_one_block_too_early(free: Any, self: Any, rows: Any, committed: Any) -> Any:
    return free(self, rows, committed + self.block_size)


FAULTS.returns("never_freed", KVCacheManager, "free_unread", None)


@FAULTS.add(KVCacheManager, "num_missing")
def absent_blocks_count_as_missing(missing: Any, self: KVCacheManager, prefix: list[int], num_tokens: int) -> int:
    return int(missing(self, prefix, num_tokens)) - prefix.count(NO_BLOCK)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)


def test_the_oracle_alone_notices_a_block_that_a_step_in_flight_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind rejected drafts read from an earlier position than planned."""
    monkeypatch.setattr(Checker, "check", lambda self: None)
    monkeypatch.setattr(Checker, "on_scheduled", lambda self, step: self._touched.update({step.step_id: set()}))
    assert_caught(FAULTS[0], speculates=True)
