"""Faults that are put into production code on purpose: the simulation of the whole must notice each of them."""

from collections.abc import Callable
from typing import Any

import pytest

from protocol.block_names import NamedBlocks
from protocol.steps import ReleaseSlots, SchedulerOutput
from services.frontend.engine.connection import SchedulerConnection
from services.frontend.engine.ledger import Holder, LedgerEntry, RequestLedger
from services.frontend.placement import Placement
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.io.frontends import FrontendConnections
from services.scheduler.leases import Leadership
from services.worker.kv_memory import BlockNames
from services.worker.session import Session
from tests.simulation.whole.device import SimulatedDevice
from tests.simulation.whole.faults import play

SEEDS = (19, 4, 6, 9, 48, 21, *range(50, 120))
"""The first six notice all mutants; the others count when a change of the engine has changed those runs."""
Patch = pytest.MonkeyPatch


def requests_are_not_submitted_again(patch: Patch) -> None:
    patch.setattr(RequestLedger, "disconnected", lambda self, engine: None)


def a_token_with_any_index_is_stored(patch: Patch) -> None:
    def deliver(self: RequestLedger, numbers: Any, _: Any, tokens: Any) -> None:
        for number, token in zip(numbers, tokens, strict=True):
            if (stream := self.streams.get(number)) is not None:
                stream.output.append(token)
                stream.tokens.append(token)
                stream.response.mark_due(stream)

    patch.setattr(RequestLedger, "deliver", deliver)


def the_last_delivered_token_is_not_submitted(patch: Patch) -> None:
    submission = LedgerEntry.submission

    def broken(self: LedgerEntry, *arguments: Any) -> Any:
        output = self.stream.output
        self.stream.output = [*output[:-1], (output[-1] + 1) % 60 + 2] if output else output
        try:
            return submission(self, *arguments)
        finally:
            self.stream.output = output

    patch.setattr(LedgerEntry, "submission", broken)


def a_scheduler_that_died_is_blamed_on_everyone(patch: Patch) -> None:
    def count_death(self: LedgerEntry, scheduler: Holder) -> None:
        if self.holder not in (None, scheduler):
            self.attempts, self.holder = self.attempts + 3, None

    patch.setattr(LedgerEntry, "count_death", count_death)


def a_stopped_scheduler_goes_on(patch: Patch) -> None:
    patch.setattr(Leadership, "lost", lambda self, now, replaced: None)


def the_end_of_a_lease_is_not_noticed(patch: Patch) -> None:
    patch.setattr(SchedulerConnection, "on_state", lambda self, state: self._signs.on_state(state))


def blocks_that_leave_a_cache_are_kept(patch: Patch) -> None:
    patch.setattr(Placement, "on_blocks_removed", lambda self, engine, names: None)


def lost_frontends_are_kept(patch: Patch) -> None:
    patch.setattr(FrontendConnections, "take_gone", lambda self: [])


def old_plans_are_executed(patch: Patch) -> None:
    """A worker goes on with its epoch after the scheduler was lost."""
    patch.setattr(Session, "reconnected", lambda self: None)


def weights_are_read_for_every_scheduler(patch: Patch) -> None:
    leave = SimulatedDevice.leave

    def broken(self: SimulatedDevice) -> None:
        leave(self)
        self.shard = None

    patch.setattr(SimulatedDevice, "leave", broken)


def tokens_in_flight_count_after_a_loss(patch: Patch) -> None:
    void = Lifecycle.void

    def broken(self: Lifecycle) -> None:
        for slot in self.epoch.running.tolist():
            if self.epoch.slots.placeholders[slot]:
                self.epoch.slots.tokens[slot] -= 1
        void(self)

    patch.setattr(Lifecycle, "void", broken)


def names_count_before_their_number_is_written(patch: Patch) -> None:
    """Also those of blocks that a killed worker was to write."""
    held = BlockNames.held

    def broken(self: BlockNames) -> NamedBlocks | None:
        self._numbers[self._names.any(1)] = 1
        return held(self)

    patch.setattr(BlockNames, "held", broken)


def blocks_of_steps_in_flight_are_fetched(patch: Patch) -> None:
    follow = BlockNames.follow

    def broken(self: BlockNames, message: SchedulerOutput | ReleaseSlots) -> None:
        follow(self, message)
        self.executed = max(self.executed, getattr(message, "step_id", 0))

    patch.setattr(BlockNames, "follow", broken)


MUTANTS: list[Callable[[Patch], None]] = [
    requests_are_not_submitted_again,
    a_token_with_any_index_is_stored,
    the_last_delivered_token_is_not_submitted,
    a_scheduler_that_died_is_blamed_on_everyone,
    a_stopped_scheduler_goes_on,
    the_end_of_a_lease_is_not_noticed,
    blocks_that_leave_a_cache_are_kept,
    lost_frontends_are_kept,
    old_plans_are_executed,
    weights_are_read_for_every_scheduler,
    tokens_in_flight_count_after_a_loss,
    names_count_before_their_number_is_written,
    blocks_of_steps_in_flight_are_fetched,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_noticed(mutant: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in SEEDS:
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{len(SEEDS)} seeds did not notice: {mutant.__name__}")
