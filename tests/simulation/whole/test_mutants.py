"""Faults that are put into production code on purpose: the simulation of the whole must notice each of them."""

from typing import Any

import pytest
from msgspec.structs import replace

from protocol.block_names import NamedBlocks
from protocol.steps import ReleaseSlots, SchedulerOutput
from services.frontend.engine.connection import SchedulerConnection
from services.frontend.engine.ledger import Holder, LedgerEntry, RequestLedger
from services.frontend.placement import Placement
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.io.frontends import FrontendConnections
from services.scheduler.leadership import Leadership
from services.worker.kv_memory import BlockNames
from services.worker.session import Session
from tests.simulation.faults import Fault, FaultList
from tests.simulation.test_mutations import a_void_counts_promised_tokens_as_known
from tests.simulation.whole.device import SimulatedDevice
from tests.simulation.whole.faults import play

NOTICED_BY = {
    "requests_are_not_submitted_again": 6, "a_stopped_scheduler_goes_on": 3, "blocks_that_leave_a_cache_are_kept": 4,
    "lost_frontends_are_kept": 0, "old_plans_are_executed": 4, "a_void_counts_promised_tokens_as_known": 2,
    "a_token_with_any_index_is_stored": 57, "the_last_delivered_token_is_not_submitted": 0,
    "a_scheduler_that_died_is_blamed_on_everyone": 6, "the_end_of_a_lease_is_not_noticed": 306,
    "weights_are_read_for_every_scheduler": 6, "names_count_before_their_number_is_written": 21,
    "blocks_of_steps_in_flight_are_fetched": 16,
}  # fmt: skip
"""A seed that notices each mutant; SEEDS count when a change of the engine has changed those runs."""
SEEDS = (*sorted({*NOTICED_BY.values()}), *range(50, 120))
MUTANTS = FaultList()
MUTANTS.returns("requests_are_not_submitted_again", RequestLedger, "disconnected", None)
MUTANTS.returns("a_stopped_scheduler_goes_on", Leadership, "lost", None)
MUTANTS.returns("blocks_that_leave_a_cache_are_kept", Placement, "on_blocks_removed", None)
MUTANTS.returns("lost_frontends_are_kept", FrontendConnections, "take_gone", [])
# A worker goes on with its epoch after the scheduler was lost
MUTANTS.returns("old_plans_are_executed", Session, "reconnected", None)
MUTANTS.append(Fault(Lifecycle, "void", a_void_counts_promised_tokens_as_known))


@MUTANTS.add(RequestLedger, "deliver")
def a_token_with_any_index_is_stored(
    deliver: Any, self: RequestLedger, engine: str, numbers: Any, indices: Any, tokens: Any
) -> list[int]:
    strays = list[int]()
    for number, token in zip(numbers, tokens, strict=True):
        stream = self.streams[engine].get(number)
        strays += deliver(self, engine, [number], [0 if stream is None else len(stream.output)], [token])
    return strays


@MUTANTS.add(LedgerEntry, "submission")
def the_last_delivered_token_is_not_submitted(submission: Any, self: LedgerEntry, *arguments: Any) -> Any:
    output = self.stream.output
    self.stream.output = [*output[:-1], (output[-1] + 1) % 60 + 2] if output else output
    try:
        return submission(self, *arguments)
    finally:
        self.stream.output = output


@MUTANTS.add(LedgerEntry, "count_death")
def a_scheduler_that_died_is_blamed_on_everyone(count: Any, self: LedgerEntry, scheduler: Holder) -> None:
    if self.holder not in (None, scheduler):
        self.attempts, self.holder = self.attempts + 3, None


@MUTANTS.add(SchedulerConnection, "on_state")
def the_end_of_a_lease_is_not_noticed(on_state: Any, self: Any, state: Any) -> None:
    on_state(self, replace(state, lease=self._lease or state.lease))


@MUTANTS.add(SimulatedDevice, "leave")
def weights_are_read_for_every_scheduler(leave: Any, self: SimulatedDevice) -> None:
    leave(self)
    self.shard = None


@MUTANTS.add(BlockNames, "held")
def names_count_before_their_number_is_written(held: Any, self: BlockNames) -> NamedBlocks | None:
    """Also those of blocks that a killed worker was to write."""
    self._numbers[self._names.any(1)] = 1
    return held(self)


@MUTANTS.add(BlockNames, "follow")
def blocks_of_steps_in_flight_are_fetched(
    follow: Any, self: BlockNames, message: SchedulerOutput | ReleaseSlots
) -> None:
    follow(self, message)
    self.executed = max(self.executed, getattr(message, "step_id", 0))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_noticed(mutant: Fault) -> None:
    with mutant.injected():
        for seed in (NOTICED_BY[mutant.name], *SEEDS):
            try:
                play(seed)
            except Exception:
                return
    pytest.fail(f"{len(SEEDS)} seeds did not notice: {mutant.name}")
