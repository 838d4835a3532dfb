"""Step records: what each step was and when each part of it happened, collected from the core's events.

`StepRecorder` is an observer of the core. The service adds what the core does not see, the times that ranks measured,
and takes the finished records in batches (services.scheduler.subscriptions).
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from protocol.codec import pack
from protocol.records import EngineEvent, EngineEventKind, RankTimes, StepRecord, StepRecords
from protocol.steps import StepTimes
from services.scheduler.core.observer import (
    AllRequestsFailed,
    DispatchStarted,
    EpochEnded,
    EpochStarted,
    Event,
    GrammarSent,
    RequestPreempted,
    ResultApplied,
    ResultArrived,
    StepDispatched,
)

MAX_RECORDS = 1024
"""Records and events kept between two calls of `take`; the oldest are dropped."""
REPORT_SECONDS = 1.0
"""How long a record waits for the reports of ranks that return no result."""

StepKey = tuple[int, int]
"""(epoch, step id)"""


@dataclass(slots=True)
class _Step:
    """A step without its result, or one that waits for the reports of other ranks."""

    event: StepDispatched
    num_ranks: int
    planned: float
    dispatched: float
    result_received: float = 0.0
    applied: float = 0.0
    generated: bytes = b""
    ranks: dict[int, StepTimes] = field(default_factory=dict)


class StepRecorder:
    """An observer that turns events into `StepRecords`. `clock`: seconds, monotonic."""

    def __init__(self, num_ranks: int, epoch: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_ranks` and `epoch` are those in effect when the recorder is attached."""
        self._num_ranks, self._epoch, self._clock = num_ranks, epoch, clock
        self._began = clock()
        """When the core began to form the next step."""
        self._steps: dict[StepKey, _Step] = {}
        self._applied: deque[StepKey] = deque()
        """Steps whose result was applied, in that order; they are in `_steps` too."""
        self._events: deque[EngineEvent] = deque()
        self._dropped = 0

    # -- what enters ---------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        match event:
            case DispatchStarted() | GrammarSent():
                self._began = self._clock()
            case StepDispatched(plan=plan):
                now = self._clock()
                self._steps[plan.epoch, plan.step_id] = _Step(event, self._num_ranks, self._began, now)
                self._began = now
            case ResultArrived(result) if (
                step := self._steps.get((result.epoch, result.step_id))
            ) is not None:
                step.result_received = step.result_received or self._clock()
            case ResultApplied():
                self._on_applied(event)
            case EpochStarted(epoch=epoch):
                self._epoch = epoch
                self._add_event(EngineEventKind.EPOCH_STARTED)
            case EpochEnded():
                self._void_steps()
                self._add_event(EngineEventKind.EPOCH_ENDED)
            case AllRequestsFailed():
                self._void_steps()
            case RequestPreempted(request=(frontend, number)):
                self._add_event(EngineEventKind.PREEMPTED, f"{frontend}/{number}")
            case _:
                pass

    def _void_steps(self) -> None:
        """Steps in flight get no record."""
        applied = set(self._applied)
        self._steps = {key: step for key, step in self._steps.items() if key in applied}

    def _on_applied(self, event: ResultApplied) -> None:
        key = event.result.epoch, event.result.step_id
        step = self._steps.get(key)
        if step is None:  # dispatched before the recorder was attached
            return
        generated = np.zeros(len(event.step.slots), np.int32)
        generated[event.step.samples] = event.counts
        step.generated, step.applied = pack(generated), self._clock()
        self._applied.append(key)
        self._bound()

    def _add_event(self, kind: EngineEventKind, text: str = "") -> None:
        self._events.append(EngineEvent(kind, self._clock(), self._epoch, text))
        self._bound()

    def _bound(self) -> None:
        while len(self._applied) + len(self._events) > MAX_RECORDS:
            self._dropped += 1
            if self._applied:
                del self._steps[self._applied.popleft()]
            else:
                self._events.popleft()

    def set_num_ranks(self, num_ranks: int) -> None:
        """Ranks of the epoch that starts."""
        self._num_ranks = num_ranks

    def add_times(self, epoch: int, step_id: int, rank: int, times: StepTimes, clock_offset: float) -> None:
        """What a rank measured. `clock_offset`: seconds by which its clock is ahead of the scheduler's."""
        if (step := self._steps.get((epoch, step_id))) is not None:
            step.ranks[rank] = _shifted(times, clock_offset)

    # -- what leaves ---------------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        return bool(self._applied or self._events)

    def take(self, everything: bool = False) -> StepRecords | None:
        """Records and events since the last call; None if there are none. A step that waits for the report of a rank is
        left for a later call, unless `everything` is taken."""
        records, now = [], self._clock()
        while self._applied:
            step = self._steps[self._applied[0]]
            waits = len(step.ranks) < step.num_ranks and now < step.applied + REPORT_SECONDS
            if waits and not everything:
                break
            del self._steps[self._applied.popleft()]
            records.append(_record(step))
        events, dropped = list(self._events), self._dropped
        self._events.clear()
        self._dropped = 0
        return StepRecords(records, events, dropped, now) if records or events or dropped else None


def _shifted(times: StepTimes, offset: float) -> StepTimes:
    """The times on the scheduler's clock; 0.0 still means that a time was not measured."""
    moments = {name: getattr(times, name) for name in times.__struct_fields__ if name != "idle"}
    return replace(times, **{name: at - offset for name, at in moments.items() if at})


def _record(step: _Step) -> StepRecord:
    event, row = step.event, step.event.step
    return StepRecord(
        epoch=event.plan.epoch,
        step_id=event.plan.step_id,
        planned=step.planned,
        dispatched=step.dispatched,
        result_received=step.result_received,
        applied=step.applied,
        ranks=[RankTimes(rank, step.ranks[rank]) for rank in sorted(step.ranks)],
        frontends=pack(event.frontends),
        numbers=pack(event.numbers),
        scheduled=pack(row.counts),
        prefills=event.prefills.tobytes(),
        drafted=pack(row.drafts),
        generated=step.generated,
        steps_in_flight=event.steps_in_flight,
        num_running=event.num_running,
        num_waiting=event.num_waiting,
        kv_cache_usage=event.kv_cache_usage,
    )
