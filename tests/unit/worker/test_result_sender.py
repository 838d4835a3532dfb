"""Messages that leave a worker from epoch to epoch, over a real connection."""

import dataclasses
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
from services.worker import result_sender
from services.worker.kv_memory import BlockNames
from services.worker.result_sender import RESULTS_KEPT, LaunchedStep, ResultSender
from services.worker.runner import Output, RanksLost
from services.worker.session import ResendResult

PATIENCE = 30.0
EMPTY = pack([])
TIMES = StepTimes(prepared=2.0, forward_began=2.0, forward_ended=3.0, sampled=4.0)


def result(epoch: int, step_id: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(epoch, step_id, EMPTY, EMPTY, EMPTY, EMPTY, TIMES)


def measured(message: msgspec.Struct) -> ModelRunnerOutput:
    """Return the result without the times that the sender set."""
    assert isinstance(message, ModelRunnerOutput)
    assert message.times.received == 1.5
    assert message.times.sent > 0
    return replace(message, times=replace(message.times, received=0.0, sent=0.0))


class PendingCopy:
    """An output whose host copy ends with `outcome` when the test sets `ended`."""

    is_done = False

    def __init__(self, outcome: ModelRunnerOutput | StepTimes | Exception) -> None:
        self._outcome = outcome
        self.begun, self.ended = threading.Event(), threading.Event()

    def get(self) -> ModelRunnerOutput | StepTimes:
        self.begun.set()
        assert self.ended.wait(PATIENCE)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class ResultOnHost:
    """An output that is done, and the thread that fetched it."""

    is_done = True

    def __init__(self, outcome: ModelRunnerOutput | Exception) -> None:
        self._outcome = outcome
        self.thread: threading.Thread | None = None

    def get(self) -> ModelRunnerOutput:
        self.thread = threading.current_thread()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


def launched(epoch: int, step_id: int, output: Output, report_times: bool = False) -> LaunchedStep:
    plan = SchedulerOutput(epoch, step_id, b"", b"", b"", b"", b"", report_times=report_times)
    return LaunchedStep(plan, output, 1.5, 0.0)


def done(
    epoch: int, step_id: int, outcome: ModelRunnerOutput | StepTimes | Exception, report_times: bool = False
) -> LaunchedStep:
    copy = PendingCopy(outcome)
    copy.ended.set()
    return launched(epoch, step_id, copy, report_times)


class ResultConnection:
    """`results` in its first epoch, as rank 3, and the scheduler's end of its connection."""

    def __init__(self, directory: Path) -> None:
        self.server = Server(f"ipc://{directory}/w", {"worker-results"})
        self.aborted = threading.Event()
        self.results = ResultSender(Client(f"ipc://{directory}/w"), self.aborted.set, silence=PATIENCE)
        self._decoder: Decoder[msgspec.Struct] = Decoder(WorkerMessage | StepResult)
        greeting = threading.Thread(target=self.results.handshake, args=("test", PATIENCE))
        greeting.start()
        self._peer = self._receive(lambda frame: isinstance(frame, Hello))[0]
        greeting.join()
        self.results.begin_epoch(1, 3)
        self.results.start()

    def _receive(self, accepts: Callable[[object], bool]) -> tuple[bytes, object]:
        while (received := self.server.receive()) is None or not accepts(received[1]):
            if received is None:
                assert self.server.socket.poll(1000 * PATIENCE), "no message arrives"
        return received

    def next_message(self, kind: type[msgspec.Struct] | None = None) -> msgspec.Struct:
        """Return the next message of this kind, or the next one that is no heartbeat."""
        while True:
            message = self._decoder.decode(self._receive(lambda _: True)[1])  # type: ignore[arg-type]
            if isinstance(message, kind) if kind else not isinstance(message, Heartbeat):
                return message

    def send(self, message: msgspec.Struct) -> None:
        self.server.send(self._peer, message)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[ResultConnection]:
    connection = ResultConnection(tmp_path)
    yield connection
    assert connection.results.close(PATIENCE)
    connection.server.close()


@pytest.fixture
def late(connection: ResultConnection) -> Callable[[ModelRunnerOutput | Exception], None]:
    """Return a function that ends a step of the first epoch after the second epoch has begun."""

    def end(outcome: ModelRunnerOutput | Exception) -> None:
        copy = PendingCopy(outcome)
        connection.results.put(launched(1, 5, copy))
        assert copy.begun.wait(PATIENCE)
        connection.results.begin_epoch(2, 0)
        copy.ended.set()

    return end


def test_a_late_result_is_neither_sent_nor_kept(connection: ResultConnection, late: Callable[..., None]) -> None:
    late(result(1, 5))
    connection.results.put(done(2, 1, result(2, 1)))
    first = connection.next_message()
    assert measured(first) == result(2, 1)
    connection.results.put(ResendResult(1))
    assert connection.next_message() == first
    while (beat := connection.next_message(Heartbeat)) != Heartbeat(2, 1, answers=0):
        assert beat == Heartbeat(2, 0, answers=0)
    connection.results.put(ResendResult(5))
    text = f"step 5 was sent again, but only the last {RESULTS_KEPT} results are kept"
    assert connection.next_message() == StepFault(2, 5, text)


def test_the_failure_of_a_step_whose_epoch_is_over_is_ignored(
    connection: ResultConnection, late: Callable[..., None]
) -> None:
    """The worker is healthy: the batch that failed is void."""
    late(OSError("the copy failed"))
    connection.results.put(done(2, 1, result(2, 1)))
    assert measured(connection.next_message()) == result(2, 1)
    assert not connection.results.failed.is_set()


def test_the_failure_of_a_step_is_the_last_message(connection: ResultConnection) -> None:
    connection.results.put(done(1, 1, OSError("the copy failed")))
    assert connection.next_message() == StepFault(1, 1, "OSError: the copy failed")
    assert connection.results.failed.wait(PATIENCE)
    assert connection.results.lost is None


def test_a_result_on_the_host_is_sent_by_the_thread_that_launched_its_step(connection: ResultConnection) -> None:
    outputs = [ResultOnHost(result(1, step_id)) for step_id in (1, 2)]
    for step_id, output in enumerate(outputs, start=1):
        connection.results.put(launched(1, step_id, output))
    assert [output.thread for output in outputs] == 2 * [threading.current_thread()]
    assert [measured(connection.next_message()) for _ in outputs] == [result(1, 1), result(1, 2)]
    connection.results.put(ResendResult(2))
    assert measured(connection.next_message()) == result(1, 2)


def test_a_result_on_the_host_is_sent_after_a_step_whose_copy_is_on_its_way(connection: ResultConnection) -> None:
    for first, second in ((1, 2), (3, 4)):
        copy, output = PendingCopy(result(1, first)), ResultOnHost(result(1, second))
        connection.results.put(launched(1, first, copy))
        connection.results.put(launched(1, second, output))
        assert output.thread is None
        copy.ended.set()
        assert [measured(connection.next_message()) for _ in range(2)] == [result(1, first), result(1, second)]
        assert output.thread is not threading.current_thread()


def test_blocks_of_a_step_can_be_read_before_its_result_is_sent(connection: ResultConnection) -> None:
    names, copy = BlockNames.empty(1, 16), PendingCopy(result(1, 1))
    connection.results.put(dataclasses.replace(launched(1, 1, copy), names=names))
    assert copy.begun.wait(PATIENCE)
    assert names.executed == 0
    copy.ended.set()
    connection.next_message()
    assert names.executed == 1
    connection.results.put(dataclasses.replace(done(1, 2, OSError("a kernel failed")), names=names))
    connection.next_message()
    assert names.executed == 1


def test_nothing_follows_the_failure_of_a_step_on_the_host(connection: ResultConnection) -> None:
    connection.results.put(launched(1, 1, ResultOnHost(OSError("no memory for the result"))))
    assert connection.results.failed.is_set()
    late = ResultOnHost(result(1, 2))
    connection.results.put(launched(1, 2, late))
    assert connection.next_message() == StepFault(1, 1, "OSError: no memory for the result")
    assert late.thread is None


def test_ranks_lost_during_a_copy_are_reported_with_their_epoch(
    connection: ResultConnection, late: Callable[..., None]
) -> None:
    connection.results.put(done(1, 1, RanksLost("rank 1 is gone")))
    assert connection.next_message() == RankLost(1, "rank 1 is gone")
    late(RanksLost("rank 1 was gone"))
    assert connection.next_message() == RankLost(1, "rank 1 was gone")
    assert not connection.results.failed.is_set()


def test_a_step_that_another_rank_reports_counts_as_progress(connection: ResultConnection) -> None:
    connection.results.put(done(1, 1, TIMES))
    connection.results.put(done(1, 2, TIMES))
    while (beat := connection.next_message(Heartbeat)) != Heartbeat(1, 2, answers=0):
        assert isinstance(beat, Heartbeat)
        assert beat.epoch == 1
        assert beat.last_step_id < 2


def test_a_rank_without_results_reports_its_times_if_the_plan_requests_them(connection: ResultConnection) -> None:
    connection.results.put(done(1, 1, TIMES))
    connection.results.put(done(1, 2, TIMES, report_times=True))
    report = connection.next_message(StepReport)
    assert isinstance(report, StepReport)
    assert (report.epoch, report.step_id, report.rank) == (1, 2, 3)
    times = report.times
    assert (times.received, times.forward_began, times.sampled) == (1.5, TIMES.forward_began, TIMES.sampled)
    assert times.sent > 0


def test_a_wait_for_ranks_is_aborted_at_the_end_of_its_own_epoch_alone(connection: ResultConnection) -> None:
    connection.results.begin_epoch(2, 3)
    with connection.results.may_wait_for_ranks():
        connection.send(EndEpoch(1))
        for _ in range(2):  # the connection is read between two heartbeats
            connection.next_message(Heartbeat)
        assert not connection.aborted.is_set()
        connection.send(EndEpoch(2))
        assert connection.aborted.wait(PATIENCE)
        connection.next_message(Heartbeat)  # heartbeats are still sent


def test_a_worker_that_does_not_wait_is_not_aborted(connection: ResultConnection) -> None:
    connection.send(EndEpoch(1))
    for _ in range(2):
        connection.next_message(Heartbeat)
    assert not connection.aborted.is_set()


def test_a_wait_for_ranks_is_aborted_when_the_scheduler_is_gone(connection: ResultConnection) -> None:
    connection.next_message(Heartbeat)
    with connection.results.may_wait_for_ranks():
        connection.server.close()
        assert connection.aborted.wait(PATIENCE)
        assert connection.results.failed.is_set()
        assert isinstance(connection.results.lost, PeerGone)


def test_work_is_measured_after_the_scheduler_is_gone(
    connection: ResultConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, a rank that hangs would never be found, and one that still loads would seem to hang."""
    measured = threading.Semaphore(0)

    def processor_seconds() -> float:
        measured.release()
        return 1.0

    connection.next_message(Heartbeat)
    connection.server.close()
    assert connection.results.failed.wait(PATIENCE)
    monkeypatch.setattr(result_sender, "processor_seconds", processor_seconds)
    with connection.results.may_wait_for_ranks():
        for _ in range(2):
            assert measured.acquire(timeout=PATIENCE)


def test_a_scheduler_that_sends_a_shutdown_and_goes_is_not_lost(connection: ResultConnection) -> None:
    """A wait for ranks is aborted; a step that still ends cannot be reported, which is not a failure."""
    connection.next_message(Heartbeat)
    with connection.results.may_wait_for_ranks():
        connection.send(Shutdown("enough"))
        connection.server.close(1000 * int(PATIENCE))
        assert connection.aborted.wait(PATIENCE)
        late = PendingCopy(result(1, 1))
        late.ended.set()
        connection.results.put(launched(1, 1, late))
        assert late.begun.wait(PATIENCE)
        assert connection.results.lost is None
        assert not connection.results.failed.is_set()


def test_a_step_that_waits_for_ranks_on_another_thread_is_aborted_with_its_epoch(connection: ResultConnection) -> None:
    copy = PendingCopy(RanksLost("aborted"))
    connection.results.begin_epoch(2, 3)
    connection.results.put(launched(2, 1, copy))
    assert copy.begun.wait(PATIENCE)
    connection.send(EndEpoch(1))
    for _ in range(2):
        connection.next_message(Heartbeat)
    assert not connection.aborted.is_set()
    connection.send(EndEpoch(2))
    assert connection.aborted.wait(PATIENCE)
    copy.ended.set()


def waits(connection: ResultConnection, *steps: tuple[float, float, float, float]) -> list[tuple[float, float]]:
    """Send steps whose forward pass lasts a second. Return the gap and the wait for a prepared step of each.

    Args:
        steps: how long the worker waited for the plan, when it received and had prepared it, and when the forward pass
            began, which was when the compute thread got the step.
    """
    found, ended = [], 0.0
    for step_id, (waited, received, prepared, began) in enumerate(steps, start=1):
        wait = began - ended if ended else 0.0
        ended = began + 1
        times = StepTimes(
            prepared=prepared, forward_began=began, forward_ended=ended, sampled=ended, prepared_wait=wait
        )
        step = done(1, step_id, replace(result(1, step_id), times=times))
        connection.results.put(dataclasses.replace(step, received=received, waited=waited))
        message = connection.next_message()
        assert isinstance(message, ModelRunnerOutput)
        found.append((message.times.forward_gap, message.times.prepared_wait))
    return found


def test_the_gap_between_forward_passes_is_measured(connection: ResultConnection) -> None:
    """The plan of the third step was there before the second one ended: the whole gap counts."""
    steps = (0.5, 1.0, 2.0, 2.0), (0.0, 2.5, 2.75, 3.25), (0.0, 2.75, 2.875, 4.75)
    assert [gap for gap, _ in waits(connection, *steps)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    "second",
    [(600.0, 603.0, 603.25, 603.25), (0.75, 2.75, 3.25, 3.25), (1.0, 3.5, 3.75, 3.75)],
    ids=["idle minutes", "a wait during the step before", "a wait that begins before the gap"],
)
def test_waits_for_a_plan_are_not_in_a_gap_and_shorten_none(
    connection: ResultConnection, second: tuple[float, float, float, float]
) -> None:
    """After a step that ended at 3.0, a gap of a quarter of a second is left."""
    assert waits(connection, (0.0, 1.0, 2.0, 2.0), second) == [(0.0, 0.0), (0.25, 0.25)]
