"""Rows that are left out of a step because their masks are late, and what may happen to their requests meanwhile."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from protocol.codec import pack
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.deferred_masks import DeferredMasks
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.results import UnknownResult
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.answer_checks import SimulatedStream
from tests.simulation.faults import Fault, FaultList, assert_caught, parameters
from tests.simulation.grammar import structured
from tests.simulation.world import World, params, prompt_of

ROOMY = Limits(
    max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, num_blocks=128, block_size=16, leaves_rows_out=True
)


def late(depth: int = 2) -> tuple[World, SimulatedStream, SimulatedStream]:
    """Return a world in which a step waits for masks that are being made, while the next one has other rows."""
    world = World(ROOMY, depth, late_masks=True)
    other = world.add(prompt_of(9, 50), params(20, eos=False))
    stream = world.add(prompt_of(12), params(20, eos=False), structured=structured(1))
    world.compiled()
    world.dispatch()
    assert world.masks.waiting
    assert world.worker.holds_back
    return world, stream, other


def left_out() -> tuple[World, SimulatedStream, SimulatedStream]:
    """Return a world in which the result of such a step was applied."""
    world, stream, other = late()
    world.leave_out()
    world.complete()
    world.dispatch()
    assert world.stage(stream) == "sampling deferred"
    assert world.store.counters["left_out_rows_total"] == 1
    return world, stream, other


def test_steps_are_dispatched_while_masks_are_missing() -> None:
    world, *_ = late(3)
    assert [len(plan.slots) // 4 for plan in world.plans] == [2, 2, 2], "constrained rows run ahead"
    assert all(plan.masked for plan in world.plans)


@pytest.mark.parametrize("depth", [2, 3])
def test_neighbours_lose_no_step(depth: int) -> None:
    """While masks are late for many steps, the other request gets a token with each, and the row stays planned."""
    world, stream, other = late(depth)
    for received in range(1, 15):
        if world.worker.holds_back:
            world.leave_out()
        world.complete()
        world.dispatch()
        world.frontends.receive()
        assert (len(other.tokens), len(stream.tokens)) == (received, 0)
        assert world.store.counters["left_out_rows_total"] == received
        assert world.store.counters["wasted_tokens_total:left_out_row"] == received
    assert all(len(plan.slots) // 4 == 2 for plan in world.plans)
    world.masks_made()
    world.drain()
    assert (len(stream.tokens), len(other.tokens)) == (20, 20)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_late_mask_costs_as_many_steps_as_it_is_late(steps: int, depth: int) -> None:
    """A token in `steps + 1` steps, while the other request gets one in each."""
    world = World(ROOMY, depth, late_masks=True)
    other = world.add(prompt_of(9, 50), params(120, eos=False))
    stream = world.add(prompt_of(12), params(120, eos=False), structured=structured(1))
    world.compiled()
    world.dispatch()
    begun: dict[int, int] = {}
    for step in range(100):
        for ticket in world.masks.waiting:
            begun.setdefault(ticket, step)
        if world.masks.waiting and begun[next(iter(world.masks.waiting))] + steps <= step:
            world.masks_made()
        world.dispatch()
        if not world.pending:
            world.leave_out()
        world.complete()
        world.dispatch()
    assert (len(other.tokens), len(stream.tokens)) == (100, 100 // (steps + 1))
    world.drain()


def test_a_row_whose_masks_come_too_late_again_and_again_waits_for_them_before_it_is_planned() -> None:
    """The workers sample each step before its masks arrive, which come as soon as the result before is applied. The
    row's next step then has them from the start, and the rows behind are planned ahead again."""
    world, stream, other = late()
    world.masks_made()
    has_row = []
    for _ in range(6):
        if world.worker.waits_for_grammar:
            world.leave_out()
        world.complete()
        if world.worker.waits_for_grammar:
            world.leave_out()
        world.dispatch()
        has_row.append(len(world.plans[-1].slots) // 4 == 2)
    assert has_row == [True, False, True, False, True, True]
    assert (len(stream.tokens), len(other.tokens)) == (1, 6)


def test_nobody_is_left_out_where_nobody_waits() -> None:
    """A step whose successors have only rows that wait for the same masks holds nobody back."""
    world = World(ROOMY, 2, late_masks=True)
    for i in range(2):
        world.add(prompt_of(12, i), params(5, eos=False), structured=structured(i))
    while world.compilation.waiting:
        world.compiled()
    world.dispatch()
    assert len(world.plans) == 2
    assert not world.worker.holds_back
    world.drain()


def test_the_core_is_not_empty_while_masks_are_made() -> None:
    """They arrive later than the end of their request, and a core that was restarted before does not know them."""
    world, *streams = left_out()
    world.abort(*streams)
    while world.engine.queue or world.epoch.fences:
        world.step()
    world.dispatch()
    assert world.masks.waiting
    assert not world.engine.is_empty
    world.masks_made()
    assert world.engine.is_empty
    world.restart(ChunkedPolicy(), 0)
    again = world.add(prompt_of(12), params(5, eos=False), structured=structured(1))
    world.compiled()
    world.drain()
    assert len(again.tokens) == 5


def test_masks_survive_lost_workers() -> None:
    """They belong to the request's tokens: they are made once, whichever workers use them."""
    world, stream, other = left_out()
    world.end_epoch()
    world.start_epoch(ROOMY, ChunkedPolicy())
    world.dispatch()
    assert len(world.masks.waiting) == 1
    world.drain()
    assert (len(stream.tokens), len(other.tokens)) == (20, 20)


def test_all_others_end_while_it_waits() -> None:
    """Then nobody is held back: the workers wait for the masks, and no further row is left out."""
    world, stream, other = left_out()
    world.abort(other)
    while world.pending or world.worker.holds_back:
        world.leave_out() if world.worker.holds_back else None
        world.step()
    world.dispatch()
    assert world.engine.queue.full
    assert not world.pending
    rows = world.store.counters["left_out_rows_total"]
    world.masks_made()
    world.drain()
    assert world.store.counters["left_out_rows_total"] == rows
    assert len(stream.tokens) == 20


# -- workers that break the rules --------------------------------------------------------------------------------


def first_result(world: World, **changes: Any) -> ModelRunnerOutput:
    """Return the result of the first step, with the constrained row left out."""
    world.leave_out()
    frame = world.pending.pop(next(iter(world.pending)))
    return msgspec.structs.replace(msgspec.msgpack.decode(frame, type=ModelRunnerOutput), **changes)


def test_no_other_row_may_be_left_out() -> None:
    world, *_ = late()
    result = first_result(world, counts=pack([0, 0]), token_ids=b"")
    with pytest.raises(UnknownResult, match="no token for slot 0 and no reason for it"):
        world.engine.on_result(result)


def test_a_token_without_masks_is_refused() -> None:
    world, *_ = late()
    result = first_result(world)
    wrong = msgspec.structs.replace(result, counts=pack([1, 1]), token_ids=pack([3, 3]))
    with pytest.raises(UnknownResult, match="whose masks were not made"):
        world.engine.on_result(wrong)


def test_only_workers_that_leave_rows_out_may_return_such_a_row() -> None:
    world = World(replace(ROOMY, leaves_rows_out=False), 1)
    world.add(prompt_of(12), params(20, eos=False), structured=structured(1))
    world.compiled()
    world.step()
    world.dispatch()
    result = msgspec.msgpack.decode(world.pending.pop(2), type=ModelRunnerOutput)
    wrong = msgspec.structs.replace(result, counts=pack([0]), token_ids=b"")
    with pytest.raises(UnknownResult, match="no token for slot 0 and no reason for it"):
        world.engine.on_result(wrong)


def test_plans_name_their_masked_rows() -> None:
    """Also of a prompt whose last chunk samples; chunks before it need no masks."""
    world = World(replace(ROOMY, max_num_batched_tokens=8), 1)
    world.add(prompt_of(20), params(3, eos=False), structured=structured(1))
    world.compiled()
    world.drain()
    plans: list[SchedulerOutput] = world.plans
    assert [bool(plan.masked) for plan in plans] == [False, False, True, True, True]


# -- faults ------------------------------------------------------------------------------------------------------


FAULTS = FaultList()


@FAULTS.add(ResultApplier, "settle")
def a_left_out_row_stays_computed(
    settle: Any, self: ResultApplier, rows: Any, drafts: Any, result: Any, live: Any
) -> None:
    """The optimistic position is not lowered."""
    settle(self, rows, drafts, result, live & (result.counts > 0))


@FAULTS.add(ResultApplier, "settle")
def a_left_out_row_is_settled_twice(
    settle: Any, self: ResultApplier, rows: Any, drafts: Any, result: Any, live: Any
) -> None:
    settle(self, rows, drafts, result, live)
    self.epoch.slots.computed[rows[live & (result.counts == 0)]] -= 1


@FAULTS.add(ResultApplier, "settle")
def a_left_out_row_stays_promised(
    settle: Any, self: ResultApplier, rows: Any, drafts: Any, result: Any, live: Any
) -> None:
    """It still counts as a sampling row in flight."""
    settle(self, rows, drafts, result, live)
    self.epoch.slots.sampling[rows[live & (result.counts == 0)]] += 1


@FAULTS.add(Request, "matching")
def masks_outlive_their_token(matching: Any, self: Request, token_ids: list[int]) -> int:
    masks, matched = self.masks, int(matching(self, token_ids))
    self.masks = masks
    return matched


@FAULTS.add(DeferredMasks, "row_masks")
def masks_of_ended_requests_are_not_sent(row_masks: Any, self: Any, slot: int, num_drafts: int, used: bool) -> Any:
    return row_masks(self, slot, num_drafts, used) if used else None


@FAULTS.add(EngineCore, "on_masks")
def masks_that_were_made_are_lost(on_masks: Any, self: EngineCore, ticket: int, masks: Any) -> None:
    on_masks(self, ticket, masks)
    for request in self.requests.values():
        if request.masks is masks and ticket % 3 == 0:
            request.masks, request.mask_ticket = None, ticket


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_fault_is_caught(fault: Fault) -> None:
    assert_caught(fault)


DRAFT_FAULTS = FaultList()


@DRAFT_FAULTS.add(ResultApplier, "settle")
def drafts_of_a_left_out_row_stay_computed(
    settle: Any, self: ResultApplier, rows: Any, drafts: Any, result: Any, live: Any
) -> None:
    settle(self, rows, drafts, result, live)
    left_out = live & (result.counts == 0)
    self.epoch.slots.computed[rows[left_out]] += drafts[left_out]


@pytest.mark.parametrize("fault", parameters(DRAFT_FAULTS))
def test_fault_of_drafts_is_caught(fault: Fault) -> None:
    assert_caught(fault, speculates=True)
