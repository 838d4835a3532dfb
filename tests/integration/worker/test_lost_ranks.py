"""Ranks that lose one another, and what frees a worker that hangs (DESIGN 7; F1, F2, F5)."""

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
from services.worker.results import EXIT_STUCK
from services.worker.service import EXIT_LOST, EXIT_REFUSED
from tests.integration.worker.scripted import HANG, ScriptedScheduler, exit_status, worker_process
from tests.unit.worker.plans import BLOCK, BLOCKS, CONTEXT, GREEDY, SLOTS, Plans, alone, prompt, tokens


class Pair:
    """Two ranks that share each layer, each with a scripted scheduler of its own: what one hears the other may not."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.schedulers, self.processes = [], []
        for name in ("0", "1"):
            (directory / name).mkdir()
            self.schedulers.append(ScriptedScheduler(f"ipc://{directory}/{name}/w"))
            stack.callback(self.schedulers[-1].close)
            self.processes.append(stack.enter_context(worker_process(directory / name)))

    def load(self, epoch: int) -> None:
        """From registration to Loaded."""
        registers = [next_of(scheduler, Register) for scheduler in self.schedulers]
        for rank, scheduler in enumerate(self.schedulers):
            meet = registers[0].rendezvous
            scheduler.send(Assignment(epoch, rank, 2, BLOCK, SLOTS, 512, CONTEXT, 2, 1, meet))
        for scheduler in self.schedulers:
            assert next_of(scheduler, Loaded).epoch == epoch

    def serve(self, epoch: int) -> None:
        """From registration to Ready."""
        self.load(epoch)
        for scheduler in self.schedulers:
            scheduler.send(InitializeCache(BLOCKS, CONTEXT))
        for scheduler in self.schedulers:
            assert next_of(scheduler, Ready).epoch == epoch

    def answers(self, epoch: int, steps: int) -> list[int]:
        """Tokens of one request, as the first rank reports them."""
        plans = Plans()
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


def next_of(scheduler: ScriptedScheduler, kind: type[msgspec.Struct]):  # type: ignore[no-untyped-def]
    """The next message of this kind; only progress, and complaints of an epoch before, may come first."""
    while not isinstance(message := scheduler.listen(), kind):
        assert isinstance(message, LoadProgress | RankLost), message
    return message


def one_step(epoch: int) -> msgspec.Struct:
    plans = Plans()
    return msgspec.structs.replace(plans.step(plans.admit(prompt(1, 6))), epoch=epoch)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(tmp_path, stack)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[ScriptedScheduler]:
    scheduler = ScriptedScheduler(f"ipc://{tmp_path}/w")
    yield scheduler
    scheduler.close()


# -- in a group --------------------------------------------------------------------------------------------------


def test_rank_that_loses_its_partner_in_a_step_says_so_and_serves_on_alone(pair: Pair) -> None:
    pair.serve(1)
    survivor = pair.schedulers[0]
    survivor.send(one_step(1))  # waits for its partner, who does not get it
    pair.processes[1].kill()
    lost = survivor.listen()
    assert isinstance(lost, RankLost)
    assert lost.epoch == 1
    survivor.send(one_step(1))
    survivor.end(1)
    again = next_of(survivor, Register)
    assert (again.epoch, again.shard) == (1, Shard(0, 2, 0, 1))
    survivor.assign(2)
    assert next_of(survivor, Loaded).epoch == 2
    survivor.send(InitializeCache(BLOCKS, CONTEXT))
    assert survivor.listen() == Ready(2)
    plans = Plans()
    request = plans.admit(prompt(1, 6))
    survivor.send(*(msgspec.structs.replace(plans.step(request), epoch=2) for _ in range(3)))
    assert [tokens(r)[request.slot] for r in survivor.results(3)] == alone(prompt(1, 6), GREEDY, 3)
    survivor.send(Shutdown())
    assert exit_status(pair.processes[0])[0] == 0


def test_rank_that_loses_its_partner_in_the_canary_step_is_well(pair: Pair) -> None:
    """It could serve: this is no LoadFailed."""
    pair.load(1)
    survivor = pair.schedulers[0]
    survivor.send(InitializeCache(BLOCKS, CONTEXT))
    survivor.wait_heartbeat()
    pair.processes[1].kill()
    lost = survivor.listen()
    assert isinstance(lost, RankLost)
    assert lost.epoch == 1
    survivor.end(1)
    assert next_of(survivor, Register).epoch == 1
    survivor.send(Shutdown())
    assert exit_status(pair.processes[0])[0] == 0


def test_end_of_the_epoch_frees_a_rank_whose_partner_never_takes_the_step(pair: Pair) -> None:
    """F5: both are alive, and the first hangs in a collective. The same two processes form the next group."""
    pair.serve(1)
    first, second = pair.schedulers
    first.send(one_step(1))
    assert first.wait_heartbeat().epoch == 1
    for scheduler in (first, second):
        scheduler.end(1)
    pair.serve(2)
    assert pair.answers(2, 4) == alone(prompt(1, 6), GREEDY, 4)
    pair.leave()


def test_scheduler_that_goes_frees_a_rank_that_hangs(pair: Pair) -> None:
    """Nobody is left who could end its epoch, and its partner stays."""
    pair.serve(1)
    first, _ = pair.schedulers
    first.send(one_step(1))
    first.wait_heartbeat()
    first.close()
    status, log = exit_status(pair.processes[0])
    assert status == EXIT_LOST
    assert "the scheduler is lost" in log
    assert pair.processes[1].poll() is None


def test_ranks_report_the_step_that_each_has_finished(pair: Pair) -> None:
    """Only the output rank has results to send; the other's progress shows in its heartbeats."""
    pair.serve(1)
    pair.answers(1, 3)
    for rank, scheduler in enumerate(pair.schedulers):
        while scheduler.wait_heartbeat().last_step_id != 3:
            pass
        assert (scheduler.heartbeats[-1].epoch, scheduler.heartbeats[-1].rank) == (1, rank)
    pair.leave()


# -- one worker --------------------------------------------------------------------------------------------------


def test_worker_that_nothing_can_free_does_not_outlive_its_scheduler(
    scheduler: ScriptedScheduler, tmp_path: Path
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
def test_worker_that_is_refused_after_it_registered_says_why(
    scheduler: ScriptedScheduler, tmp_path: Path, serving: bool
) -> None:
    """F18: what the scheduler names stands in the log, and the exit status says that it was refused."""
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


def test_spare_waits_and_then_serves(scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    """Its heart beats without an epoch; one that is ended before it ever got a place makes it register again."""
    with worker_process(tmp_path) as process:
        scheduler.registered()
        assert scheduler.wait_heartbeat().epoch == 0
        scheduler.end(4)  # its silence was too long, says the scheduler, and has forgotten it
        scheduler.serve(5)
        plans = Plans()
        request = plans.admit(prompt(1, 6))
        scheduler.send(msgspec.structs.replace(plans.step(request), epoch=5))
        (result,) = scheduler.results(1)
        assert (result.epoch, result.step_id) == (5, 1)
        while scheduler.wait_heartbeat().epoch != 5:
            pass
        scheduler.send(Shutdown())
        assert exit_status(process)[0] == 0
