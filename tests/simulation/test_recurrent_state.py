"""Recurrent states: one of each request, changed once by each of its positions."""

from dataclasses import replace
from typing import Any

import pytest

from protocol.kv_groups import KVGroup
from protocol.membership import Loaded
from services.config import SchedulerConfig
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.limits import Limits
from services.scheduler.core.plan import StepPlanner
from services.scheduler.core.request import Request
from services.scheduler.membership.sizes import GroupError, fit
from tests.simulation.faults import Fault, FaultList, assert_caught, parameters
from tests.simulation.grammar import structured
from tests.simulation.invariants import Checker
from tests.simulation.oracle import OracleViolation, OracleWorker
from tests.simulation.test_acceptance import DEPTHS
from tests.simulation.world import World, params, prompt_of

STATE = KVGroup("recurrent_state")
LIMITS = Limits(4, 16, 128, 64, 4, leaves_rows_out=True, groups=(STATE, KVGroup(), STATE))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_holds_one_block_of_each_state(depth: int) -> None:
    """From its first step to its end, beside the blocks of its tokens; and nothing of it is a prefix hit."""
    world = World(LIMITS, depth)
    stream = world.add(prompt_of(40), params(20, eos=False))
    while world.engine.has_requests:
        world.step()
        held = 64 - world.epoch.kv.num_free
        assert held in (0, 2 + len(world.epoch.kv.tables[0]))
    again = world.add(prompt_of(40), params(20, eos=False))
    world.drain()
    assert (again.hit, again.tokens) == (0, stream.tokens)


def test_states_limit_admission() -> None:
    """Each of three requests needs a block for its tokens and two for its states, and there are eight."""
    world = World(replace(LIMITS, num_blocks=8, max_model_len=16), 1)
    for number in range(3):
        world.add(prompt_of(2, number), params(2, eos=False))
    world.step()
    assert (len(world.epoch.running), world.epoch.kv.num_free) == (2, 2)
    world.drain()


def test_the_position_that_may_be_taken_back_has_a_row_of_its_own() -> None:
    """The last chunk of a constrained prompt ends before its last token; other prompts are not cut."""
    world = World(LIMITS, 1)
    world.add(prompt_of(20), params(2, eos=False), structured=structured(1))
    world.compiled()
    world.drain()
    counts = [plan.counts for plan in world.plans]
    assert [int.from_bytes(count, "little") for count in counts] == [16, 3, 1, 1]
    world.add(prompt_of(20), params(2, eos=False))
    world.drain()
    assert [int.from_bytes(plan.counts, "little") for plan in world.plans[4:]] == [16, 4, 1]


def answer(late: bool, length: int = 12, depth: int = 2) -> list[int]:
    """Return the tokens of a constrained request. `late`: its row is left out of many steps before its first token."""
    world = World(LIMITS, depth, late_masks=late)
    world.add(prompt_of(9, 50), params(40, eos=False))
    stream = world.add(prompt_of(length), params(10, eos=False), structured=structured(1))
    world.compiled()
    world.dispatch()
    for _ in range(12 if late else 0):
        if world.worker.holds_back:
            world.leave_out()
        world.complete()
        world.dispatch()
    assert (world.store.counters["left_out_rows_total"] > 5) == late
    world.drain()
    return stream.tokens


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("length", [1, 12])
def test_a_row_is_left_out_again_and_again(length: int, depth: int) -> None:
    """Its state is taken back each time, so the answer is that of masks in time."""
    assert answer(True, length, depth) == answer(False, length, depth)


def test_a_worker_that_takes_no_state_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OracleWorker, "_take_back", lambda self, slot: None)
    with pytest.raises(OracleViolation, match="recurrent state: slot 1 computes position 11 from state"):
        answer(late=True)


def settings(**changed: Any) -> SchedulerConfig:
    return SchedulerConfig.model_validate({"block_size": 16, **changed})


def loaded(*groups: KVGroup) -> list[Loaded]:
    return [Loaded("", 4096, 512, 1, 100, groups=groups)]


def test_drafts_are_refused_by_name() -> None:
    drafts = settings(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    with pytest.raises(GroupError, match="--speculative-config: this model has recurrent states"):
        fit(drafts, loaded(STATE, KVGroup()))
    with pytest.raises(GroupError, match="or impossible ones"):
        fit(settings(), loaded(STATE))


@pytest.mark.parametrize("stages", [1, 2])
def test_rows_are_left_out_only_where_one_stage_takes_their_states_back(stages: int) -> None:
    config = settings(pipeline_parallel_size=stages)
    assert fit(config, loaded(STATE, KVGroup()), leaves_rows_out=True).leaves_rows_out == (stages == 1)
    assert fit(config, loaded(KVGroup()), leaves_rows_out=True).leaves_rows_out


FAULTS = FaultList()


@FAULTS.add(StepPlanner, "offered")
def a_whole_prompt_may_be_taken_back(offered: Any, self: StepPlanner, request: Request, hit: int, most: int) -> int:
    return min(len(request.token_ids) - hit, most)


@FAULTS.add(KVCacheManager, "__init__")
def prefixes_are_hits(init: Any, self: KVCacheManager, *arguments: Any, **named: Any) -> None:
    init(self, *arguments, **named)
    self.enable_prefix_caching = True


@FAULTS.add(EpochState, "leave")
def a_state_is_given_away_in_flight(leave: Any, self: EpochState, slot: int, state: int) -> None:
    blocks, self.kv.states[slot] = self.kv.states[slot], []
    self.kv.pool.give_back(blocks)
    leave(self, slot, state)


@FAULTS.add(KVCacheManager, "num_missing")
def states_need_no_block(missing: Any, self: KVCacheManager, prefix: list[int], num_tokens: int) -> int:
    return int(missing(self, prefix, num_tokens)) - self.num_states


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)


@pytest.mark.soak
def test_the_oracle_alone_notices_a_row_of_several_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checker, "on_scheduled", lambda self, step: self._touched.update({step.step_id: set()}))
    assert_caught(FAULTS[0])
