"""Step records: what each step was and when each part of it happened, collected from the core's events.

`StepRecorder` is an observer of the core. The service adds what the core does not see, the times that ranks measured,
and takes the finished records in batches (services.scheduler.subscriptions).
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, NamedTuple

import numpy as np

from protocol.records import (
    EngineEvent,
    EngineEventKind,
    RankTimes,
    RequestRecord,
    RequestTimes,
    StepRecord,
    StepRecords,
)
from protocol.steps import STEP_DURATIONS, StepTimes
from services.scheduler.core import observer as events

MAX_RECORDS = 2048
"""Records, events and requests kept between two calls of `take`; the oldest are dropped."""
REPORT_SECONDS = 1.0
"""Seconds that a record waits for the reports of ranks that return no result."""

MAX_LOG = 8 * MAX_RECORDS
"""Events between two calls of `take` after which the log is read."""
StepKey = tuple[int, int]
"""(epoch, step id)"""
_moments_of = attrgetter(*(name for name in StepTimes.__struct_fields__ if name not in STEP_DURATIONS))
_durations_of = attrgetter(*STEP_DURATIONS)


@dataclass(slots=True)
class _Step:
    """A step without its result, or one that waits for the reports of other ranks."""

    event: events.StepDispatched
    planned: float
    dispatched: float
    num_ranks: int
    received: float = 0.0
    applied: float = 0.0
    generated: bytes = b""
    ranks: dict[int, RankTimes] = field(default_factory=dict)

    def record(self) -> StepRecord:
        event, row, plan = self.event, self.event.step, self.event.plan
        return StepRecord(
            epoch=plan.epoch,
            step_id=plan.step_id,
            planned=self.planned,
            dispatched=self.dispatched,
            result_received=self.received,
            applied=self.applied,
            ranks=[self.ranks[rank] for rank in sorted(self.ranks)],
            frontends=event.frontends.tobytes(),
            numbers=event.numbers.tobytes(),
            scheduled=row.counts.tobytes(),
            prefills=(row.starts < event.entries).tobytes(),
            drafted=row.drafts.tobytes(),
            generated=self.generated,
            steps_in_flight=event.steps_in_flight,
            num_running=event.num_running,
            num_waiting=event.num_waiting,
            kv_cache_usage=event.kv_cache_usage,
            num_speculative_tokens=row.proposes,
            is_draft_trial=row.is_trial,
            speculation_rests=row.rests,
        )


class _Report(NamedTuple):
    """Times of one rank for one step."""

    key: StepKey
    rank: RankTimes
    """On the clock of the rank."""
    clock_offset: float
    """Seconds by which the rank's clock is ahead of the scheduler's."""


class StepRecorder:
    """An observer that turns events into `StepRecords`.

    Inside the scheduling loop it only appends events to a log; `take` reads the log.
    """

    def __init__(self, num_ranks: int, epoch: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_ranks` and `epoch` are those in effect when the recorder is attached. `clock`: seconds, monotonic."""
        self._num_ranks, self._epoch, self._clock = num_ranks, epoch, clock
        self._log: list[tuple[float, events.Event | _Report]] = []
        self._began = clock()
        """When the core began to form the next step."""
        self._steps: dict[StepKey, _Step] = {}
        self._applied: deque[StepKey] = deque()
        """Steps whose result was applied, in that order; they are in `_steps` too."""
        self._events: deque[EngineEvent] = deque()
        self._requests: deque[RequestRecord] = deque()
        self._dropped = 0

    # -- what enters ---------------------------------------------------------------------------------------------

    def observe(self, event: events.Event | _Report) -> None:
        if type(event) in self._READERS:
            self._log.append((self._clock(), event))
            if len(self._log) >= MAX_LOG:
                self._read_log()

    def add_times(self, epoch: int, step_id: int, rank: RankTimes, clock_offset: float) -> None:
        """Add the times of a rank. `clock_offset`: seconds by which its clock is ahead of the scheduler's."""
        self.observe(_Report((epoch, step_id), rank, clock_offset))

    def set_num_ranks(self, num_ranks: int) -> None:
        """Ranks of the epoch that starts."""
        self._read_log()
        self._num_ranks = num_ranks

    # -- the log -------------------------------------------------------------------------------------------------

    def _read_log(self) -> None:
        log, self._log = self._log, []
        for now, entry in log:
            self._READERS[type(entry)](self, now, entry)
        while len(self._applied) + len(self._events) + len(self._requests) > MAX_RECORDS:
            self._drop_oldest()

    def _on_forming(self, now: float, event: events.DispatchStarted | events.GrammarSent) -> None:
        self._began = now

    def _on_dispatched(self, now: float, event: events.StepDispatched) -> None:
        for new, key in zip(event.plan.new, event.requests, strict=True):
            self._requests.append(RequestRecord(*key, new.request_id, new.num_prompt_tokens))
        self._steps[event.plan.epoch, event.plan.step_id] = _Step(event, self._began, now, self._num_ranks)
        self._began = now

    def _on_report(self, now: float, report: _Report) -> None:
        if (step := self._steps.get(report.key)) is not None:
            rank, times = report.rank, _shifted(report.rank.times, report.clock_offset)
            step.ranks[rank.rank] = RankTimes(rank.rank, times, rank.returns_result)

    def _on_arrived(self, now: float, event: events.ResultArrived) -> None:
        step = self._steps.get((event.result.epoch, event.result.step_id))
        if step is not None and not step.received:
            step.received = now

    def _on_applied(self, now: float, event: events.ResultApplied) -> None:
        key = event.result.epoch, event.result.step_id
        step = self._steps.get(key)
        if step is None:  # dispatched before the recorder was attached
            return
        generated = np.zeros(len(event.step.slots), np.int32)
        generated[event.step.samples] = event.counts
        step.generated, step.applied = generated.tobytes(), now
        self._applied.append(key)

    def _on_finished(self, now: float, event: events.RequestFinished) -> None:
        finish = event.finish
        self._requests.append(
            RequestRecord(
                event.frontend,
                finish.number,
                event.request_id,
                outcome=finish.reason.name,
                times=finish.times or RequestTimes(),
                num_cached_tokens=finish.num_cached_tokens,
                num_preemptions=finish.num_preemptions,
            )
        )

    def _on_other(self, now: float, event: events.Event) -> None:
        match event:
            case events.RequestPreempted(request=(frontend, number)):
                self._add_event(now, EngineEventKind.PREEMPTED, f"{frontend}/{number}")
            case events.EpochStarted(epoch=epoch):
                self._epoch = epoch
                self._add_event(now, EngineEventKind.EPOCH_STARTED)
            case events.EpochEnded():
                self._add_event(now, EngineEventKind.EPOCH_ENDED, f"{self._void_steps()} steps in flight are void")
            case events.AllRequestsFailed():
                self._void_steps()

    _READERS: ClassVar[dict[type, Callable[..., None]]] = {
        _Report: _on_report,
        events.AllRequestsFailed: _on_other,
        events.DispatchStarted: _on_forming,
        events.EpochEnded: _on_other,
        events.EpochStarted: _on_other,
        events.GrammarSent: _on_forming,
        events.RequestFinished: _on_finished,
        events.RequestPreempted: _on_other,
        events.ResultApplied: _on_applied,
        events.ResultArrived: _on_arrived,
        events.StepDispatched: _on_dispatched,
    }
    """Handlers of the events that are logged. While the log has an entry the scheduler wakes often, so none is written
    in each turn."""

    def _void_steps(self) -> int:
        """Drop the steps in flight, which get no record. Return their number."""
        applied, before = set(self._applied), len(self._steps)
        self._steps = {key: step for key, step in self._steps.items() if key in applied}
        return before - len(self._steps)

    def _add_event(self, at: float, kind: EngineEventKind, text: str = "") -> None:
        self._events.append(EngineEvent(kind, at, self._epoch, text))

    def _drop_oldest(self) -> None:
        self._dropped += 1
        if self._applied:
            del self._steps[self._applied.popleft()]
        else:
            (self._events or self._requests).popleft()

    # -- what leaves ---------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        return bool(self._applied or self._events or self._log)

    def take(self, everything: bool = False) -> StepRecords | None:
        """Records and events since the last call; None if there are none. A step that waits for the report of a rank is
        left for a later call, unless `everything` is taken."""
        self._read_log()
        records, now = [], self._clock()
        while self._applied:
            step = self._steps[self._applied[0]]
            waits = len(step.ranks) < step.num_ranks and now < step.applied + REPORT_SECONDS
            if waits and not everything:
                break
            del self._steps[self._applied.popleft()]
            records.append(step.record())
        if not (records or self._events or self._dropped or everything):
            return None  # a request alone waits for a step: its first one, or the next one of others
        batch = StepRecords(records, list(self._events), self._dropped, now, list(self._requests))
        self._events.clear()
        self._requests.clear()
        self._dropped = 0
        return batch


def _shifted(times: StepTimes, offset: float) -> StepTimes:
    """Return the times on the scheduler's clock; 0.0 still means that a time was not measured."""
    moments = [at and at - offset for at in _moments_of(times)]
    return StepTimes(*(*moments, *_durations_of(times)))
