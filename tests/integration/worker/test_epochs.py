"""A worker serves several epochs on the same connections (docs/membership.md)."""

import threading
from pathlib import Path

import msgspec
import pytest

from protocol.block_names import NAME_BYTES, NamedBlocks
from protocol.membership import InitializeCache, Ping, Pong, RankLost, Ready, Register, Shard
from protocol.steps import BlocksLoaded, LoadBlocks, ModelRunnerOutput, ReleaseSlots
from services import kv_keeper
from services.worker.result_sender import EXIT_STUCK
from tests.integration.worker.scripted import (
    HANG,
    HANG_RESULT,
    PATIENCE,
    ScriptedWorkerServer,
    exit_status,
    worker_process,
    worker_thread,
)
from tests.unit.worker.plans import BLOCKS, CONTEXT, GREEDY, PlanBuilder, alone, one_request, prompt, tokens
from tests.waiting import wait_until


def answers(scheduler: ScriptedWorkerServer, epoch: int, steps: int) -> list[int]:
    """Return the tokens of one request alone; the results are of this epoch and their steps count from 1."""
    plans, request = one_request()
    scheduler.send(*(msgspec.structs.replace(plans.step(request), epoch=epoch) for _ in range(steps)))
    results = scheduler.results(steps)
    assert [(r.epoch, r.step_id) for r in results] == [(epoch, i + 1) for i in range(steps)]
    return [tokens(result)[request.slot] for result in results]


def test_the_next_epoch_keeps_nothing_but_the_weights(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    with worker_thread(scheduler, tmp_path):
        scheduler.serve(1)
        first = scheduler.received[0]
        assert isinstance(first, Register)
        assert (first.epoch, first.shard) == (0, None)
        assert answers(scheduler, 1, 4) == alone(prompt(1, 6), GREEDY, 4)
        scheduler.end(1)
        scheduler.serve(2)
        again = next(m for m in scheduler.received[1:] if isinstance(m, Register))
        assert (again.epoch, again.shard) == (1, Shard())
        assert again.rendezvous != first.rendezvous, "each epoch has its own rendezvous"
        assert answers(scheduler, 2, 4) == alone(prompt(1, 6), GREEDY, 4)


@pytest.mark.parametrize("phase", ["registered", "loaded", "initialising"])
def test_an_epoch_may_end_before_it_serves(scheduler: ScriptedWorkerServer, tmp_path: Path, phase: str) -> None:
    with worker_thread(scheduler, tmp_path):
        scheduler.registered()
        if phase != "registered":
            scheduler.load(1)
        if phase == "initialising":
            scheduler.initialize(1)
        scheduler.end(1)
        scheduler.serve(2)
        assert answers(scheduler, 2, 3) == alone(prompt(1, 6), GREEDY, 3)


@pytest.mark.parametrize(("hang", "is_lost"), [(HANG, False), (HANG, True), (HANG_RESULT, False)])
def test_a_worker_with_a_stuck_step_exits(
    scheduler: ScriptedWorkerServer, tmp_path: Path, hang: str, is_lost: bool
) -> None:
    """The forward pass or the thread behind it never returns and waits in no collective: the process exits with a
    status of its own, although the next epoch may have begun.

    Args:
        is_lost: the scheduler is gone, not only the epoch.
    """
    with worker_process(tmp_path, before=hang) as process:
        scheduler.serve(1)
        plans = PlanBuilder()
        scheduler.send(plans.step(plans.admit(prompt(1, 6))))
        scheduler.wait_heartbeat()
        if is_lost:
            scheduler.close()
        else:
            scheduler.end(1)
        if hang is HANG_RESULT:
            scheduler.serve(2)
        status, log = exit_status(process)
        assert status == EXIT_STUCK
        assert "closed the connection, but the last step does not end" in log or not is_lost
        assert "the last step does not end" in log


@pytest.mark.parametrize("phase", ["serving", "sampling"])
def test_steps_in_flight_when_the_epoch_ends_are_void(
    scheduler: ScriptedWorkerServer, tmp_path: Path, phase: str
) -> None:
    """Their late results carry the number of their epoch. In "sampling" masks never arrive."""
    with worker_thread(scheduler, tmp_path, sim_step_ms=100.0):
        scheduler.serve(1)
        plans, request = one_request()
        scheduler.send(*(plans.step(request) for _ in range(3)))
        if phase == "sampling":
            scheduler.send(plans.step(request, masked=[request]))
        scheduler.results(1)
        scheduler.end(1)
        awaited = [Register, RankLost] if phase == "sampling" else [Register]
        while awaited:
            message = scheduler.next_message()
            assert isinstance(message, ModelRunnerOutput | RankLost | Register)
            assert message.epoch == 1
            awaited = [kind for kind in awaited if not isinstance(message, kind)]
        scheduler.load(2)
        scheduler.initialize(2)
        assert answers(scheduler, 2, 3) == alone(prompt(1, 6), GREEDY, 3)


@pytest.mark.parametrize("when", ["spare", "next epoch", "never", "before"])
def test_a_worker_that_misses_a_drop_loses_the_names_of_its_blocks(
    scheduler: ScriptedWorkerServer, tmp_path: Path, when: str
) -> None:
    """A spare is sent it; a worker that was lost is told with its next cache. One that has had a drop which the
    scheduler does not know may have missed others. So does its tier in memory."""
    named = NamedBlocks.from_lists([3], [bytes(NAME_BYTES)])

    def is_in_tier() -> bool:
        scheduler.send(Ping(number=1))
        pong = scheduler.next_message()
        assert isinstance(pong, Pong)
        return pong.tiers[0].size > 0

    with worker_thread(scheduler, tmp_path, kv_offload_bytes=1 << 20):
        scheduler.serve(1)
        if when == "before":
            scheduler.send(LoadBlocks(1, 1, 1, b"", b"", drops_all=True))
            assert scheduler.next_message() == BlocksLoaded(1, 1, 0)
        scheduler.send(ReleaseSlots(1, b"", named))
        wait_until(is_in_tier, "the block is written")
        scheduler.end(1)
        scheduler.registered()
        if when == "spare":
            scheduler.send(LoadBlocks(2, 0, 0, b"", b"", dropped=bytes(NAME_BYTES), drops_all=True))
            assert scheduler.next_message() == BlocksLoaded(2, 0, 0)
        loaded = scheduler.load(3)
        assert (loaded.held, loaded.dropped_in) == ((None, 2) if when == "spare" else (named, int(when == "before")))
        last = 0 if when in ("never", "before") else 2
        scheduler.send(InitializeCache(BLOCKS, CONTEXT, dropped_in=last))
        assert scheduler.next_message() == Ready(3)
        scheduler.end(3)
        scheduler.registered()
        loaded = scheduler.load(4)
        assert (loaded.held, loaded.dropped_in) == (named if when == "never" else None, last)
        scheduler.send(InitializeCache(BLOCKS, CONTEXT, dropped_in=last))
        assert scheduler.next_message() == Ready(4)
        assert is_in_tier() == (when == "never")


def test_no_step_waits_for_a_keeper_that_does_not_answer(
    scheduler: ScriptedWorkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop is answered when the keeper has carried it out."""
    goes_on, patient = threading.Event(), "import services.kv_keeper; services.kv_keeper.TIMEOUT = 600.0\n"
    free = kv_keeper.Memories.free

    def stopped(memories: kv_keeper.Memories) -> None:
        goes_on.wait(PATIENCE)  # a worker that waits for this answers in another order
        free(memories)

    with (
        kv_keeper.keeping(tmp_path, 600.0) as kept,
        worker_process(tmp_path, patient, kv_keeper=kept[kv_keeper.KV_KEEPER]),
    ):
        scheduler.serve(1)
        monkeypatch.setattr(kv_keeper.Memories, "free", stopped)
        scheduler.send(LoadBlocks(1, 1, 1, b"", b"", drops_all=True))
        try:
            assert answers(scheduler, 1, 4) == alone(prompt(1, 6), GREEDY, 4)
        finally:
            goes_on.set()
        assert scheduler.next_message() == BlocksLoaded(1, 1, 0)
