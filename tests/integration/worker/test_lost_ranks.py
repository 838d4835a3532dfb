"""Lost ranks, and what ends the wait of a rank that hangs in a collective (docs/membership.md)."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from protocol.membership import (
    Assignment,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadProgress,
    Ping,
    Pong,
    RankLost,
    Ready,
    Register,
    Shard,
    Shutdown,
)
from services.worker import result_sender
from services.worker.service import EXIT_LOST, EXIT_REFUSED
from tests.integration.worker.scripted import ScriptedWorkerServer, exit_status, worker_process, worker_thread
from tests.preloaded import PreloadedProcess
from tests.unit.worker.plans import BLOCK, BLOCKS, CONTEXT, GREEDY, SLOTS, PlanBuilder, alone, prompt, tokens


class RankProcess:
    """A worker process and the scripted scheduler that it alone is connected to."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        directory.mkdir()
        self.scheduler = ScriptedWorkerServer(f"ipc://{directory}/w")
        stack.callback(self.scheduler.close)
        self.process: PreloadedProcess = stack.enter_context(worker_process(directory, recovery_timeout_seconds=0.2))

    def end(self) -> None:
        """Kill the process, and wait for its status: `poll` returns None for a while after it has ended."""
        self.process.kill()
        self.process.wait()

    def next_of(self, kind: type[msgspec.Struct]):  # type: ignore[no-untyped-def]
        """Return the next message of this kind; only progress and lost ranks may be reported before."""
        while not isinstance(message := self.scheduler.next_message(), kind):
            assert isinstance(message, LoadProgress | RankLost), message
        return message


class RankPair:
    """Two tensor-parallel ranks that serve one epoch after the other; each gets messages of its own.

    Between tests both wait for their assignment. A process that a test ends is replaced: each start imports torch.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.epoch = 0
        self.ranks: list[RankProcess] = []
        self._registered: list[Register] = []

    def begin_epoch(self) -> None:
        """Replace ended processes, and take both ranks from their registration to Loaded in the next epoch."""
        self.epoch += 1
        self.ranks = [rank for rank in self.ranks if rank.process.poll() is None]
        while len(self.ranks) < 2:
            name = f"{self.epoch}.{len(self.ranks)}"
            self.ranks.append(RankProcess(self._directory / name, self._stack))
        rendezvous = self._registrations()[0].rendezvous
        for number, rank in enumerate(self.ranks):
            place = Assignment(self.epoch, number, 2, BLOCK, SLOTS, 512, CONTEXT, 2, 1, rendezvous)
            rank.scheduler.send(place)
        for rank in self.ranks:
            assert rank.next_of(Loaded).epoch == self.epoch

    def _registrations(self) -> list[Register]:
        return [rank.next_of(Register) for rank in self.ranks]

    def serve(self) -> None:
        """Take both ranks from their registration to Ready in the next epoch."""
        self.begin_epoch()
        for rank in self.ranks:
            rank.scheduler.send(InitializeCache(BLOCKS, CONTEXT))
        for rank in self.ranks:
            assert rank.next_of(Ready).epoch == self.epoch

    def end_epoch(self) -> None:
        for rank in self.ranks:
            rank.scheduler.end(self.epoch)

    def answers(self, steps: int) -> list[int]:
        """Return the tokens of one request, which the first rank reports."""
        plans = PlanBuilder()
        request = plans.admit(prompt(1, 6))
        for _ in range(steps):
            step = msgspec.structs.replace(plans.step(request), epoch=self.epoch)
            for rank in self.ranks:
                rank.scheduler.send(step)
        results = self.ranks[0].scheduler.results(steps)
        assert [(r.epoch, r.step_id) for r in results] == [(self.epoch, i + 1) for i in range(steps)]
        return [tokens(result)[request.slot] for result in results]

    def one_step(self) -> msgspec.Struct:
        """Return the first step of the epoch."""
        plans = PlanBuilder()
        return msgspec.structs.replace(plans.step(plans.admit(prompt(1, 6))), epoch=self.epoch)

    def leave(self) -> None:
        """Shut both ranks down; they leave in order."""
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.scheduler.send(Shutdown())
                assert exit_status(rank.process)[0] == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPair]:
    with ExitStack() as stack:
        pair = RankPair(tmp_path_factory.mktemp("pair"), stack)
        yield pair
        pair.leave()


# -- in a group --------------------------------------------------------------------------------------------------


def test_the_end_of_the_epoch_ends_the_wait_for_a_partner_that_never_joins(pair: RankPair) -> None:
    """The rank serves a later epoch, and says until then that it has its weights."""
    pair.serve()
    pair.end_epoch()
    first, second = pair.ranks
    rendezvous = first.next_of(Register).rendezvous
    epoch = pair.epoch = pair.epoch + 1
    first.scheduler.send(Assignment(epoch, 0, 2, BLOCK, SLOTS, 512, CONTEXT, 2, 1, rendezvous))
    first.scheduler.wait_heartbeat()
    first.scheduler.end(epoch)
    assert first.next_of(Register).shard == Shard(0, 2, 0, 1)
    assert second.next_of(Register).epoch == epoch - 1
    for rank in pair.ranks:
        rank.scheduler.end(epoch)  # so that it registers again
    pair.serve()
    pair.end_epoch()


def test_a_rank_that_loses_its_partner_in_a_step_reports_it_and_serves_alone(pair: RankPair) -> None:
    pair.serve()
    epoch, survivor = pair.epoch, pair.ranks[0]
    survivor.scheduler.send(pair.one_step())  # it waits for its partner, which does not get the step
    pair.ranks[1].end()
    lost = survivor.scheduler.next_message()
    assert isinstance(lost, RankLost)
    assert lost.epoch == epoch
    survivor.scheduler.send(pair.one_step())
    survivor.scheduler.end(epoch)
    again = survivor.next_of(Register)
    assert (again.epoch, again.shard) == (epoch, Shard(0, 2, 0, 1))
    epoch = pair.epoch = pair.epoch + 1
    survivor.scheduler.assign(epoch)
    assert survivor.next_of(Loaded).epoch == epoch
    survivor.scheduler.send(InitializeCache(BLOCKS, CONTEXT))
    assert survivor.scheduler.next_message() == Ready(epoch)
    plans = PlanBuilder()
    request = plans.admit(prompt(1, 6))
    survivor.scheduler.send(*(msgspec.structs.replace(plans.step(request), epoch=epoch) for _ in range(3)))
    results = survivor.scheduler.results(3)
    assert [tokens(result)[request.slot] for result in results] == alone(prompt(1, 6), GREEDY, 3)
    survivor.scheduler.end(epoch)


def test_a_rank_that_loses_its_partner_in_the_canary_step_is_healthy(pair: RankPair) -> None:
    """It reports lost ranks and not that its model cannot be served."""
    pair.begin_epoch()
    survivor = pair.ranks[0].scheduler
    survivor.send(InitializeCache(BLOCKS, CONTEXT))
    survivor.wait_heartbeat()
    pair.ranks[1].end()
    lost = survivor.next_message()
    assert isinstance(lost, RankLost)
    assert lost.epoch == pair.epoch
    survivor.end(pair.epoch)


def test_the_end_of_the_epoch_ends_the_wait_for_a_partner_without_the_step(pair: RankPair) -> None:
    """Both are alive, and the first hangs in a collective. The same two processes form the next group."""
    pair.serve()
    processes = [rank.process for rank in pair.ranks]
    first = pair.ranks[0].scheduler
    first.send(pair.one_step())
    assert first.wait_heartbeat().epoch == pair.epoch
    pair.end_epoch()
    pair.serve()
    assert [rank.process for rank in pair.ranks] == processes
    assert pair.answers(4) == alone(prompt(1, 6), GREEDY, 4)
    pair.end_epoch()


def test_the_loss_of_the_scheduler_ends_the_wait_of_a_rank_that_hangs(pair: RankPair) -> None:
    """Without a scheduler its epoch cannot be ended; its partner stays."""
    pair.serve()
    first, partner = pair.ranks
    first.scheduler.send(pair.one_step())
    first.scheduler.wait_heartbeat()
    first.scheduler.close()
    status, log = exit_status(first.process)
    assert status == EXIT_LOST
    assert "the scheduler is lost" in log
    assert partner.process.poll() is None
    partner.scheduler.end(pair.epoch)


# -- one worker --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serving", [False, True])
def test_a_worker_that_is_refused_after_it_registered_logs_the_reason(
    scheduler: ScriptedWorkerServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, serving: bool
) -> None:
    """The log has the reason, and the exit status is that of a refused worker."""
    with worker_thread(scheduler, tmp_path) as worker:
        if serving:
            scheduler.serve()
        else:
            scheduler.registered()
        scheduler.refuse("dtype mismatch: this worker has 'float32', the group 'bfloat16'")
        assert worker.exit_status() == EXIT_REFUSED
    assert "this worker has 'float32', the group 'bfloat16'" in caplog.text
    assert not any(record.exc_info for record in caplog.records), "a traceback is logged"


def test_a_worker_answers_signs_of_life_on_each_connection(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    with worker_thread(scheduler, tmp_path):
        scheduler.serve()
        scheduler.send(Ping(12.5, 3))
        answer = scheduler.next_message()
        assert isinstance(answer, Pong)
        assert (answer.ping_sent, answer.number) == (12.5, 3)
        scheduler.beat(7)
        while (answered := scheduler.wait_heartbeat().answers) != 7:
            assert answered == 0, "the sign on the other connection does not count here"


def test_a_worker_that_hears_the_end_of_its_epoch_on_one_connection_alone_connects_again(
    scheduler: ScriptedWorkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing arrives on its connection for plans, which lives."""
    monkeypatch.setattr(result_sender, "ABORT_GRACE", 0.2)
    with worker_thread(scheduler, tmp_path):
        scheduler.serve(3)
        before = scheduler.worker
        scheduler.end_on_results(3)
        assert scheduler.registered().returns
        assert scheduler.worker != before


def test_a_spare_serves_when_it_is_assigned(scheduler: ScriptedWorkerServer, tmp_path: Path) -> None:
    """It sends heartbeats of epoch 0. The end of any epoch makes it register again: the scheduler has dropped it."""
    with worker_thread(scheduler, tmp_path):
        scheduler.registered()
        assert scheduler.wait_heartbeat() == scheduler.wait_heartbeat() == Heartbeat(0, 0, answers=0)
        scheduler.end(4)  # the scheduler has dropped it after a heartbeat timeout
        scheduler.serve(5)
        plans = PlanBuilder()
        request = plans.admit(prompt(1, 6))
        scheduler.send(msgspec.structs.replace(plans.step(request), epoch=5))
        (result,) = scheduler.results(1)
        assert (result.epoch, result.step_id) == (5, 1)
        while scheduler.wait_heartbeat().epoch != 5:
            pass
