"""Lost ranks, and what ends the wait of a rank that hangs in a collective (docs/membership.md)."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from protocol.membership import (
    Assignment,
    InitializeCache,
    Loaded,
    LoadProgress,
    RankLost,
    Ready,
    Register,
    Shard,
    Shutdown,
)
from services.worker.result_sender import EXIT_STUCK
from services.worker.service import EXIT_LOST, EXIT_REFUSED
from tests.integration.worker.scripted import HANG, ScriptedWorkerServer, exit_status, worker_process
from tests.unit.worker.plans import BLOCK, BLOCKS, CONTEXT, GREEDY, SLOTS, PlanBuilder, alone, prompt, tokens


class RankPair:
    """Two tensor-parallel ranks, each with a scripted scheduler of its own, so that each gets messages of its own."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.schedulers, self.processes = [], []
        for name in ("0", "1"):
            (directory / name).mkdir()
            self.schedulers.append(ScriptedWorkerServer(f"ipc://{directory}/{name}/w"))
            stack.callback(self.schedulers[-1].close)
            self.processes.append(stack.enter_context(worker_process(directory / name)))

    def load(self, epoch: int) -> None:
        """Take both ranks from registration to Loaded."""
        registers = [next_of(scheduler, Register) for scheduler in self.schedulers]
        for rank, scheduler in enumerate(self.schedulers):
            rendezvous = registers[0].rendezvous
            scheduler.send(Assignment(epoch, rank, 2, BLOCK, SLOTS, 512, CONTEXT, 2, 1, rendezvous))
        for scheduler in self.schedulers:
            assert next_of(scheduler, Loaded).epoch == epoch

    def serve(self, epoch: int) -> None:
        """Take both ranks from registration to Ready."""
        self.load(epoch)
        for scheduler in self.schedulers:
            scheduler.send(InitializeCache(BLOCKS, CONTEXT))
        for scheduler in self.schedulers:
            assert next_of(scheduler, Ready).epoch == epoch

    def answers(self, epoch: int, steps: int) -> list[int]:
        """Return the tokens of one request, which the first rank reports."""
        plans = PlanBuilder()
        request = plans.admit(prompt(1, 6))
        for _ in range(steps):
            step = msgspec.structs.replace(plans.step(request), epoch=epoch)
            for scheduler in self.schedulers:
                scheduler.send(step)
        results = self.schedulers[0].results(steps)
        assert [(r.epoch, r.step_id) for r in results] == [(epoch, i + 1) for i in range(steps)]
        return [tokens(result)[request.slot] for result in results]

    def leave(self) -> None:
        for scheduler, process in zip(self.schedulers, self.processes, strict=True):
            scheduler.send(Shutdown())
            assert exit_status(process)[0] == 0


def next_of(scheduler: ScriptedWorkerServer, kind: type[msgspec.Struct]):  # type: ignore[no-untyped-def]
    """Return the next message of this kind; only progress and lost ranks may be reported before."""
    while not isinstance(message := scheduler.next_message(), kind):
        assert isinstance(message, LoadProgress | RankLost), message
    return message


def one_step(epoch: int) -> msgspec.Struct:
    plans = PlanBuilder()
    return msgspec.structs.replace(plans.step(plans.admit(prompt(1, 6))), epoch=epoch)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[RankPair]:
    with ExitStack() as stack:
        yield RankPair(tmp_path, stack)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[ScriptedWorkerServer]:
    scheduler = ScriptedWorkerServer(f"ipc://{tmp_path}/w")
    yield scheduler
    scheduler.close()


# -- in a group --------------------------------------------------------------------------------------------------


def test_a_rank_that_loses_its_partner_in_a_step_reports_it_and_serves_alone(pair: RankPair) -> None:
    pair.serve(1)
    survivor = pair.schedulers[0]
    survivor.send(one_step(1))  # it waits for its partner, which does not get the step
    pair.processes[1].kill()
    lost = survivor.next_message()
    assert isinstance(lost, RankLost)
    assert lost.epoch == 1
    survivor.send(one_step(1))
    survivor.end(1)
    again = next_of(survivor, Register)
    assert (again.epoch, again.shard) == (1, Shard(0, 2, 0, 1))
    survivor.assign(2)
    assert next_of(survivor, Loaded).epoch == 2
    survivor.send(InitializeCache(BLOCKS, CONTEXT))
    assert survivor.next_message() == Ready(2)
    plans = PlanBuilder()
    request = plans.admit(prompt(1, 6))
    survivor.send(*(msgspec.structs.replace(plans.step(request), epoch=2) for _ in range(3)))
    assert [tokens(r)[request.slot] for r in survivor.results(3)] == alone(prompt(1, 6), GREEDY, 3)
    survivor.send(Shutdown())
    assert exit_status(pair.processes[0])[0] == 0


def test_a_rank_that_loses_its_partner_in_the_canary_step_is_healthy(pair: RankPair) -> None:
    """It reports lost ranks and not that its model cannot be served."""
    pair.load(1)
    survivor = pair.schedulers[0]
    survivor.send(InitializeCache(BLOCKS, CONTEXT))
    survivor.wait_heartbeat()
    pair.processes[1].kill()
    lost = survivor.next_message()
    assert isinstance(lost, RankLost)
    assert lost.epoch == 1
    survivor.end(1)
    assert next_of(survivor, Register).epoch == 1
    survivor.send(Shutdown())
    assert exit_status(pair.processes[0])[0] == 0


def test_the_end_of_the_epoch_ends_the_wait_for_a_partner_without_the_step(pair: RankPair) -> None:
    """Both are alive, and the first hangs in a collective. The same two processes form the next group."""
    pair.serve(1)
    first, second = pair.schedulers
    first.send(one_step(1))
    assert first.wait_heartbeat().epoch == 1
    for scheduler in (first, second):
        scheduler.end(1)
    pair.serve(2)
    assert pair.answers(2, 4) == alone(prompt(1, 6), GREEDY, 4)
    pair.leave()


def test_the_loss_of_the_scheduler_ends_the_wait_of_a_rank_that_hangs(pair: RankPair) -> None:
    """Without a scheduler its epoch cannot be ended; its partner stays."""
    pair.serve(1)
    first, _ = pair.schedulers
    first.send(one_step(1))
    first.wait_heartbeat()
    first.close()
    status, log = exit_status(pair.processes[0])
    assert status == EXIT_LOST
    assert "the scheduler is lost" in log
    assert pair.processes[1].poll() is None


def test_heartbeats_report_the_last_step_of_each_rank(pair: RankPair) -> None:
    """Only the output rank sends results; the heartbeats of the other one show its progress."""
    pair.serve(1)
    pair.answers(1, 3)
    for rank, scheduler in enumerate(pair.schedulers):
        while scheduler.wait_heartbeat().last_step_id != 3:
            pass
        assert (scheduler.heartbeats[-1].epoch, scheduler.heartbeats[-1].rank) == (1, rank)
    pair.leave()


# -- one worker --------------------------------------------------------------------------------------------------


def test_a_worker_with_a_stuck_step_exits_when_its_scheduler_is_gone(
    scheduler: ScriptedWorkerServer, tmp_path: Path
) -> None:
    with worker_process(tmp_path, before=HANG) as process:
        scheduler.serve()
        scheduler.send(one_step(1))
        scheduler.wait_heartbeat()
        scheduler.close()
        status, log = exit_status(process)
        assert status == EXIT_STUCK
        assert "closed the connection, but the last step does not end" in log


@pytest.mark.parametrize("serving", [False, True])
def test_a_worker_that_is_refused_after_it_registered_logs_the_reason(
    scheduler: ScriptedWorkerServer, tmp_path: Path, serving: bool
) -> None:
    """The log has the reason, and the exit status is that of a refused worker."""
    with worker_process(tmp_path) as process:
        if serving:
            scheduler.serve()
        else:
            scheduler.registered()
        scheduler.refuse("dtype mismatch: this worker has 'float32', the group 'bfloat16'")
        status, log = exit_status(process)
        assert status == EXIT_REFUSED
        assert "this worker has 'float32', the group 'bfloat16'" in log
        assert "Traceback" not in log


def test_a_spare_serves_when_it_is_assigned(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    """It sends heartbeats of epoch 0. The end of any epoch makes it register again: the scheduler has dropped it."""
    with worker_process(tmp_path) as process:
        scheduler.registered()
        assert scheduler.wait_heartbeat().epoch == 0
        scheduler.end(4)  # the scheduler has dropped it after a heartbeat timeout
        scheduler.serve(5)
        plans = PlanBuilder()
        request = plans.admit(prompt(1, 6))
        scheduler.send(msgspec.structs.replace(plans.step(request), epoch=5))
        (result,) = scheduler.results(1)
        assert (result.epoch, result.step_id) == (5, 1)
        while scheduler.wait_heartbeat().epoch != 5:
            pass
        scheduler.send(Shutdown())
        assert exit_status(process)[0] == 0
