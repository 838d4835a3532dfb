"""What leaves a worker while its epochs come and go, over a real connection."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from protocol.codec import Decoder, pack
from protocol.handshake import Hello
from protocol.membership import EndEpoch, Heartbeat, RankLost, Shutdown, WorkerMessage
from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepFault, StepReport, StepResult, StepTimes
from protocol.transport import Client, PeerGone, Server
from services.worker.results import RESULTS_KEPT, Launched, Repeat, Results
from services.worker.runner import Output, RanksLost

PATIENCE = 30.0
EMPTY = pack([])
TIMES = StepTimes(prepared=2.0, forward_began=2.0, forward_ended=3.0, sampled=4.0)


def result(epoch: int, step_id: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(epoch, step_id, EMPTY, EMPTY, EMPTY, EMPTY, TIMES)


def measured(message: msgspec.Struct) -> ModelRunnerOutput:
    """The result without the times that it got on its way out."""
    assert isinstance(message, ModelRunnerOutput)
    assert message.times.received == 1.5
    assert message.times.sent > 0
    return replace(message, times=replace(message.times, received=0.0, sent=0.0))


class Copy:
    """An output whose host copy ends when the test says so, in `outcome`."""

    def __init__(self, outcome: ModelRunnerOutput | StepTimes | Exception) -> None:
        self._outcome = outcome
        self.begun, self.ended = threading.Event(), threading.Event()

    def get(self) -> ModelRunnerOutput | StepTimes:
        self.begun.set()
        assert self.ended.wait(PATIENCE)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def launched(epoch: int, step_id: int, output: Output, report_times: bool = False) -> Launched:
    plan = SchedulerOutput(epoch, step_id, b"", b"", b"", b"", b"", report_times=report_times)
    return Launched(plan, output, 1.5, 0.0)


def done(
    epoch: int, step_id: int, outcome: ModelRunnerOutput | StepTimes | Exception, report_times: bool = False
) -> Launched:
    copy = Copy(outcome)
    copy.ended.set()
    return launched(epoch, step_id, copy, report_times)


class Worker:
    """`results` in its first epoch, as rank 3, and the scheduler's end of its connection."""

    def __init__(self, directory: Path) -> None:
        self.server = Server(f"ipc://{directory}/w", {"worker-results"})
        self.aborted = threading.Event()
        self.results = Results(Client(f"ipc://{directory}/w"), self.aborted.set)
        self._decoder: Decoder[msgspec.Struct] = Decoder(WorkerMessage | StepResult)
        greeting = threading.Thread(target=self.results.handshake, args=("test", PATIENCE))
        greeting.start()
        self._peer = self._receive(lambda frame: isinstance(frame, Hello))[0]
        greeting.join()
        self.results.enter(1, 3)
        self.results.start()

    def _receive(self, wanted: Callable[[object], bool]) -> tuple[bytes, object]:
        while (received := self.server.receive()) is None or not wanted(received[1]):
            if received is None:
                assert self.server.socket.poll(1000 * PATIENCE), "nothing is said"
        return received

    def hears(self, kind: type[msgspec.Struct] | None = None) -> msgspec.Struct:
        """The next message of this kind; any that is no heartbeat if none is given."""
        while True:
            message = self._decoder.decode(self._receive(lambda _: True)[1])  # type: ignore[arg-type]
            if isinstance(message, kind) if kind else not isinstance(message, Heartbeat):
                return message

    def says(self, message: msgspec.Struct) -> None:
        self.server.send(self._peer, message)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    assert worker.results.close(PATIENCE)
    worker.server.close()


@pytest.fixture
def late(worker: Worker) -> Callable[[ModelRunnerOutput | Exception], None]:
    """Lets a step of the first epoch end in this way when the second one has begun."""

    def end(outcome: ModelRunnerOutput | Exception) -> None:
        copy = Copy(outcome)
        worker.results.put(launched(1, 5, copy))
        assert copy.begun.wait(PATIENCE)
        worker.results.enter(2, 0)
        copy.ended.set()

    return end


def test_late_result_is_neither_sent_nor_kept(worker: Worker, late: Callable[..., None]) -> None:
    late(result(1, 5))
    worker.results.put(done(2, 1, result(2, 1)))
    first = worker.hears()
    assert measured(first) == result(2, 1)
    worker.results.put(Repeat(1))
    assert worker.hears() == first
    while (beat := worker.hears(Heartbeat)) != Heartbeat(2, 1, 0):
        assert beat == Heartbeat(2, 0, 0)
    worker.results.put(Repeat(5))
    text = f"step 5 is asked for again, but only the last {RESULTS_KEPT} results are kept"
    assert worker.hears() == StepFault(2, 5, text)


def test_failure_of_a_step_whose_epoch_is_over_costs_nobody(
    worker: Worker, late: Callable[..., None]
) -> None:
    """This worker is well: the batch that failed is void."""
    late(OSError("the copy failed"))
    worker.results.put(done(2, 1, result(2, 1)))
    assert measured(worker.hears()) == result(2, 1)
    assert not worker.results.failed.is_set()


def test_failure_of_a_step_is_the_last_word(worker: Worker) -> None:
    worker.results.put(done(1, 1, OSError("the copy failed")))
    assert worker.hears() == StepFault(1, 1, "OSError: the copy failed")
    assert worker.results.failed.wait(PATIENCE)
    assert worker.results.lost is None


def test_ranks_lost_on_the_way_to_the_host_carry_their_epoch(
    worker: Worker, late: Callable[..., None]
) -> None:
    worker.results.put(done(1, 1, RanksLost("rank 1 is gone")))
    assert worker.hears() == RankLost(1, "rank 1 is gone")
    late(RanksLost("rank 1 was gone"))
    assert worker.hears() == RankLost(1, "rank 1 was gone")
    assert not worker.results.failed.is_set()


def test_step_that_another_rank_reports_counts_as_progress(worker: Worker) -> None:
    worker.results.put(done(1, 1, TIMES))
    worker.results.put(done(1, 2, TIMES))
    while (beat := worker.hears(Heartbeat)) != Heartbeat(1, 2, 3):
        assert isinstance(beat, Heartbeat)
        assert (beat.epoch, beat.rank) == (1, 3)
        assert beat.last_step_id < 2


def test_rank_without_results_reports_its_times_where_the_plan_asks(worker: Worker) -> None:
    worker.results.put(done(1, 1, TIMES))
    worker.results.put(done(1, 2, TIMES, report_times=True))
    report = worker.hears(StepReport)
    assert isinstance(report, StepReport)
    assert (report.epoch, report.step_id, report.rank) == (1, 2, 3)
    times = report.times
    assert (times.received, times.forward_began, times.sampled) == (1.5, TIMES.forward_began, TIMES.sampled)
    assert times.sent > 0


def test_who_waits_for_ranks_is_woken_at_the_end_of_this_epoch_and_of_no_other(worker: Worker) -> None:
    worker.results.enter(2, 3)
    worker.results.waits_for_ranks = True
    worker.says(EndEpoch(1))
    for _ in range(2):  # it listens between two heartbeats
        worker.hears(Heartbeat)
    assert not worker.aborted.is_set()
    worker.says(EndEpoch(2))
    assert worker.aborted.wait(PATIENCE)
    worker.hears(Heartbeat)  # the scheduler still hears of it


def test_who_waits_for_nobody_is_left_in_peace(worker: Worker) -> None:
    worker.says(EndEpoch(1))
    for _ in range(2):
        worker.hears(Heartbeat)
    assert not worker.aborted.is_set()


def test_who_waits_for_ranks_is_woken_when_the_scheduler_is_gone(worker: Worker) -> None:
    worker.hears(Heartbeat)
    worker.results.waits_for_ranks = True
    worker.server.close()
    assert worker.aborted.wait(PATIENCE)
    assert worker.results.failed.is_set()
    assert isinstance(worker.results.lost, PeerGone)


def test_scheduler_that_says_goodbye_and_goes_is_not_lost(worker: Worker) -> None:
    """Who waits for ranks is woken; what still ends has nobody to go to, and that is no failure."""
    worker.hears(Heartbeat)
    worker.results.waits_for_ranks = True
    worker.says(Shutdown("enough"))
    worker.server.close(1000 * int(PATIENCE))
    assert worker.aborted.wait(PATIENCE)
    late = Copy(result(1, 1))
    late.ended.set()
    worker.results.put(launched(1, 1, late))
    assert late.begun.wait(PATIENCE)
    assert worker.results.lost is None
    assert not worker.results.failed.is_set()
