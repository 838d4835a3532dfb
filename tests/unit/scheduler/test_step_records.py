"""Step records: built from the core's events and the times of ranks, in order, and bounded."""

import numpy as np
import pytest

from protocol.codec import pack, unpack
from protocol.records import EngineEventKind, RankTimes, RequestRecord, RequestTimes, StepRecords
from protocol.requests import Finish, FinishReason
from protocol.sampling import SamplingParams
from protocol.steps import ModelRunnerOutput, NewRequest, SchedulerOutput, StepTimes
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import (
    DispatchStarted,
    EpochEnded,
    EpochStarted,
    RequestFinished,
    ResultApplied,
    ResultArrived,
    StepDispatched,
    TimeAdvanced,
)
from services.scheduler.step_records import MAX_RECORDS, REPORT_SECONDS, StepRecorder

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=32, block_size=4)
MEASURED = StepTimes(101.0, 101.25, 101.25, 101.5, 101.75, 102.0, 0.125)


class RecordedCore:
    """A recorder, and the events of steps with two rows: a prefill chunk that does not sample, and a decode."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.now = 0.0
        self.recorder = StepRecorder(num_ranks, epoch=1, clock=lambda: self.now)

    def dispatch(self, step_id: int, epoch: int = 1, new: tuple[NewRequest, ...] = ()) -> StepDispatched:
        slots, ones = np.array([3, 0], np.int64), np.ones(2, np.int32)
        samples = np.array([False, True])
        step = InflightStep(
            step_id, slots, ones, ones, np.array([5, 1], np.int32), samples, np.zeros(2, np.int32), 6, 3, True
        )
        plan = SchedulerOutput(epoch, step_id, b"", b"", b"", b"", b"", list(new))
        event = StepDispatched(
            step,
            plan,
            requests=tuple((2, 40 + i) for i in range(len(new))),
            frontends=np.array([0, 1], np.int32),
            numbers=np.array([7, 2**32 - 1], np.uint32),
            entries=np.array([9, 1], np.int32),
            steps_in_flight=2,
            num_running=2,
            num_waiting=5,
            kv_cache_usage=0.25,
        )
        self.recorder.observe(event)
        return event

    def apply(self, event: StepDispatched, tokens: int = 1) -> None:
        result = ModelRunnerOutput(event.plan.epoch, event.plan.step_id, b"", b"", b"", b"")
        self.recorder.observe(ResultArrived(result))
        counts = np.array([tokens], np.int32)
        self.recorder.observe(ResultApplied(event.step, result, np.ones(1, np.int8), counts, np.zeros(1, np.bool_), ()))

    def report(self, event: StepDispatched, rank: int, offset: float = 0.0) -> None:
        self.recorder.add_times(event.plan.epoch, event.plan.step_id, RankTimes(rank, MEASURED), offset)

    def take(self) -> StepRecords:
        taken = self.recorder.take()
        assert taken is not None
        return taken


def test_a_record_tells_rows_counts_and_times_in_order() -> None:
    core = RecordedCore()
    core.now = 1.0
    core.recorder.observe(DispatchStarted())
    core.now = 1.5
    event = core.dispatch(1)
    core.report(event, 0, offset=100.0)
    core.now = 3.0
    core.apply(event, tokens=2)
    (record,) = core.take().records
    assert (record.planned, record.dispatched, record.result_received, record.applied) == (1.0, 1.5, 3.0, 3.0)
    assert unpack(record.frontends).tolist() == [0, 1]
    assert np.frombuffer(record.numbers, np.uint32).tolist() == [7, 2**32 - 1]
    assert unpack(record.scheduled).tolist() == [5, 1]
    assert record.prefills == b"\1\0"
    assert record.drafted == pack([0, 0])
    assert unpack(record.generated).tolist() == [0, 2]
    assert (record.steps_in_flight, record.num_running, record.num_waiting) == (2, 2, 5)
    assert record.kv_cache_usage == 0.25
    assert (record.num_speculative_tokens, record.is_draft_trial) == (3, True)
    core.recorder.observe(TimeAdvanced(4.0))
    assert not core.recorder.pending, "the scheduler sleeps"
    assert core.recorder.take() is None


def test_a_rank_s_times_are_shifted_to_the_scheduler_s_clock_and_what_was_not_measured_stays_zero() -> None:
    core = RecordedCore()
    event = core.dispatch(1)
    durations = {"idle": 0.5, "plan_wait": 0.25, "prepared_wait": 0.125, "forward_gap": 0.75}
    times = StepTimes(received=101.0, sampled=102.0, **durations)
    core.recorder.add_times(1, 1, RankTimes(0, times, returns_result=True), clock_offset=100.0)
    core.apply(event)
    (record,) = core.take().records
    assert record.ranks[0].returns_result
    assert record.ranks[0].times == StepTimes(
        received=1.0, sampled=2.0, idle=0.5, plan_wait=0.25, prepared_wait=0.125, forward_gap=0.75
    )


def test_the_next_step_is_planned_from_the_moment_the_one_before_was_dispatched() -> None:
    core = RecordedCore()
    first = core.dispatch(1)
    core.now = 2.0
    second = core.dispatch(2)
    for event in (first, second):
        core.report(event, 0)
        core.apply(event)
    one, two = core.take().records
    assert one.dispatched == two.planned < two.dispatched


def test_a_record_waits_for_the_reports_of_all_ranks_but_not_for_ever() -> None:
    core = RecordedCore(num_ranks=2)
    event = core.dispatch(1)
    core.report(event, 1)
    core.apply(event)
    assert core.recorder.take() is None
    core.report(event, 0)
    assert [r.rank for r in core.take().records[0].ranks] == [0, 1]
    lacking = core.dispatch(2)
    core.apply(lacking)
    core.now += REPORT_SECONDS
    assert core.take().records[0].ranks == []


def test_everything_is_taken_at_the_end() -> None:
    core = RecordedCore(num_ranks=2)
    core.apply(core.dispatch(1))
    assert core.recorder.take() is None
    taken = core.recorder.take(everything=True)
    assert len(taken.records) == 1


def test_steps_in_flight_when_the_epoch_ends_have_no_record_and_the_end_is_an_event() -> None:
    core = RecordedCore()
    done, lost = core.dispatch(1), core.dispatch(2)
    core.report(done, 0)
    core.apply(done)
    core.recorder.observe(EpochEnded(1))
    core.recorder.observe(EpochStarted(2, LIMITS))
    core.apply(lost)
    taken = core.take()
    assert [record.step_id for record in taken.records] == [1]
    assert [(e.kind, e.epoch) for e in taken.events] == [
        (EngineEventKind.EPOCH_ENDED, 1),
        (EngineEventKind.EPOCH_STARTED, 2),
    ]
    assert taken.events[0].text == "1 steps in flight are void"


def test_a_step_dispatched_before_the_recorder_was_attached_has_no_record() -> None:
    core, other = RecordedCore(), RecordedCore()
    core.apply(other.dispatch(1))
    assert core.recorder.take() is None


def test_a_request_is_recorded_when_it_enters_a_slot_and_when_it_ends() -> None:
    core = RecordedCore()
    event = core.dispatch(1, new=(NewRequest(1, 1, pack([7] * 6), 5, b"", SamplingParams(4), request_id="cmpl-1"),))
    assert core.recorder.take() is None
    core.report(event, 0)
    core.apply(event)
    times = RequestTimes(1.0, 2.0, 3.0, 4.0)
    core.recorder.observe(RequestFinished(2, "cmpl-1", Finish(40, FinishReason.LENGTH, None, 16, 1, times=times)))
    assert core.take().requests == [
        RequestRecord(2, 40, "cmpl-1", num_prompt_tokens=5),
        RequestRecord(2, 40, "cmpl-1", outcome="LENGTH", times=times, num_cached_tokens=16, num_preemptions=1),
    ]


def test_requests_are_bounded_too() -> None:
    core = RecordedCore()
    for number in range(MAX_RECORDS + 3):
        core.recorder.observe(RequestFinished(0, "", Finish(number, FinishReason.ABORT)))
    taken = core.take()
    assert (len(taken.requests), taken.dropped, taken.requests[-1].number) == (MAX_RECORDS, 3, MAX_RECORDS + 2)


@pytest.mark.parametrize("more", [1, 7])
def test_when_nobody_takes_the_oldest_records_are_dropped_and_counted(more: int) -> None:
    core = RecordedCore()
    for step_id in range(1, MAX_RECORDS + more + 1):
        event = core.dispatch(step_id)
        core.report(event, 0)
        core.apply(event)
    taken = core.take()
    assert [record.step_id for record in taken.records] == [*range(more + 1, MAX_RECORDS + more + 1)]
    assert taken.dropped == more
    core.apply(core.dispatch(5000))
    core.now += REPORT_SECONDS
    assert core.take().dropped == 0
