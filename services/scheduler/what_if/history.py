"""Requests and steps of a recording: the load of a what-if, and the measurements of its cost model."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from protocol.codec import pack, unpack
from protocol.requests import FinishReason, GenerateRequest
from protocol.steps import ModelRunnerOutput
from services.scheduler.core.observer import (
    GrammarReady,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    RequestRefused,
    ResultArrived,
    TimeAdvanced,
)
from services.scheduler.core.request import RequestKey
from services.scheduler.core.slots import Column
from services.scheduler.recording.records import (
    AppliedRecord,
    ArrivalRecord,
    PlanRecord,
    RecordingHeader,
)
from services.scheduler.recording.replay import Turn, turns_of
from services.scheduler.recording.segments import EventRecording
from services.scheduler.recording.surrogates import Surrogates
from services.scheduler.what_if.cost import StepCost, Vector, features_of


@dataclass(eq=False)
class RecordedRequest:
    arrived: float
    """Seconds on the scheduler's clock, as all times here."""
    frontend: int
    message: GenerateRequest
    """With its tokens, or with surrogates."""
    tokens: Column
    """Prompt and output, or surrogates of them."""
    length: int
    """Tokens, prompt and output, at its end."""
    reason: FinishReason | None = None
    """None: it was open at the end of the recording."""
    first_token: float = 0.0
    ended: float = 0.0
    grammar_seconds: float | None = None
    """Time until its grammar was compiled; None: it has none."""
    is_refused: bool = False

    @property
    def num_outputs(self) -> int:
        return self.length - self.message.num_prompt_tokens


class Drafted(NamedTuple):
    """Drafts of one row with drafts."""

    verified: int
    accepted: int


@dataclass
class History:
    requests: list[RecordedRequest] = field(default_factory=list)
    features: list[Vector] = field(default_factory=list)
    """Features of each step with times."""
    seconds: list[float] = field(default_factory=list)
    """Time of each of these steps on the device."""
    gaps: list[float] = field(default_factory=list)
    """Times between a step on the device and the next one, whose plan was there."""
    latencies: list[float] = field(default_factory=list)
    """Time of each step from its dispatch to its result, without the time on the device and the wait for it."""
    drafted: list[Drafted] = field(default_factory=list)
    num_preemptions: int = 0

    @classmethod
    def read(cls, recording: EventRecording) -> "History":
        """Raises: RecordingError"""
        reader = _HistoryReader(recording.header)
        if reader.surrogates is not None:
            reader.surrogates.read(recording.records())
        for turn in turns_of(recording.records()):
            reader.take(turn)
        return reader.history

    def cost(self) -> StepCost:
        """Raises: ValueError, if there are too few steps."""
        return StepCost.fit(self.features, self.seconds)

    @property
    def gap(self) -> float:
        return _typical(self.gaps)

    @property
    def latency(self) -> float:
        return max(_typical(self.latencies), 0.0)


def _typical(seconds: list[float]) -> float:
    """Return the mean without the longest tenth, which something else delayed; 0.0 if there are none."""
    shortest = sorted(seconds)[: max(len(seconds) * 9 // 10, 1)]
    return float(np.mean(shortest)) if shortest else 0.0


class _InFlight(NamedTuple):
    record: PlanRecord
    dispatched: float
    slots: list[int]
    """Slots of the sampling rows."""


class _HistoryReader:
    def __init__(self, header: RecordingHeader) -> None:
        self.history = History()
        self.surrogates = None if header.has_tokens else Surrogates(header)
        self._now = 0.0
        self._num_arrivals = 0
        self._open: dict[RequestKey, RecordedRequest] = {}
        self._owners: dict[int, RecordedRequest] = {}
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._results: dict[tuple[int, int], ModelRunnerOutput] = {}
        self._last_sampled: tuple[int, int, float] = (0, 0, 0.0)
        """Epoch, step id and end of the step that returned last."""

    def take(self, turn: Turn) -> None:
        match turn.cause:
            case TimeAdvanced(now=now):
                self._now = now
            case RequestArrived(frontend=frontend, message=message):
                self._arrive(frontend, message, unpack(message.token_ids))
            case ArrivalRecord():
                self._arrive_without_tokens(turn.cause)
            case GrammarReady(request=key) if key in self._open:
                self._open[key].grammar_seconds = self._now - self._open[key].arrived
            case ResultArrived(result=result):
                self._results[result.epoch, result.step_id] = result
                self._measure(result)
        for record in turn.decisions:
            match record:
                case PlanRecord():
                    self._dispatched(record)
                case AppliedRecord():
                    self._applied(record)
                case RequestRefused(frontend=frontend, finish=finish):
                    if (request := self._open.pop((frontend, finish.number), None)) is not None:
                        request.is_refused = True
                case RequestFinished():
                    self._finished(record)
                case RequestPreempted():
                    self.history.num_preemptions += 1
                case _:
                    pass

    def _arrive_without_tokens(self, record: ArrivalRecord) -> None:
        assert self.surrogates is not None
        tokens = self.surrogates.tokens_of(self._num_arrivals, record.num_tokens)
        message = replace(record.message, token_ids=pack(tokens[: record.num_tokens]))
        self._arrive(record.frontend, message, tokens)

    def _arrive(self, frontend: int, message: GenerateRequest, tokens: Column) -> None:
        self._num_arrivals += 1
        length = len(message.token_ids) // 4
        request = RecordedRequest(self._now, frontend, message, tokens, length)
        if self._open.setdefault((frontend, message.number), request) is request:
            self.history.requests.append(request)

    def _dispatched(self, record: PlanRecord) -> None:
        plan = record.plan
        for new, key in zip(plan.new, record.requests, strict=True):
            if key in self._open:
                self._owners[new.slot] = self._open[key]
        samples = np.frombuffer(plan.samples, np.bool_)
        slots = unpack(plan.slots)[samples].tolist()
        self._in_flight[plan.epoch, plan.step_id] = _InFlight(record, self._now, slots)

    def _measure(self, result: ModelRunnerOutput) -> None:
        """Take the times of a step."""
        key, times, h = (result.epoch, result.step_id), result.times, self.history
        step = self._in_flight.get(key)
        busy = times.sampled - times.forward_began
        if step is None or not times.forward_began or busy <= 0:
            return
        if not step.record.plan.has_structured_output_requests:  # its time includes the wait for the masks
            h.features.append(features_of(step.record.plan))
            h.seconds.append(busy)
            # Differences of each clock alone: the clocks of scheduler and workers may differ.
            if times.prepared:
                h.latencies.append(self._now - step.dispatched - (times.sampled - times.prepared))
        epoch, before, sampled = self._last_sampled
        if (epoch, before + 1) == key and times.prepared <= sampled:
            h.gaps.append(max(times.forward_began - sampled, 0.0))
        self._last_sampled = (*key, times.sampled)
        if step.record.plan.drafts and result.drafted:
            planned = unpack(step.record.plan.drafts)[np.frombuffer(step.record.plan.samples, np.bool_)]
            columns = (planned, unpack(result.drafted), unpack(result.counts))
            for most, verified, count in zip(*(column.tolist() for column in columns), strict=True):
                if most:
                    h.drafted.append(Drafted(verified, max(count - 1, 0)))

    def _applied(self, record: AppliedRecord) -> None:
        key = (record.epoch, record.step_id)
        step, result = self._in_flight.pop(key, None), self._results.pop(key, None)
        if step is None or result is None:
            return
        ids, at = unpack(result.token_ids), 0
        for slot, width, count in zip(
            step.slots, unpack(result.counts).tolist(), unpack(record.counts).tolist(), strict=True
        ):
            if (owner := self._owners.get(slot)) is not None and count:
                if len(ids):
                    owner.tokens = np.concatenate((owner.tokens, ids[at : at + count]))
                owner.length += count
            at += width

    def _finished(self, record: RequestFinished) -> None:
        finish = record.finish
        request = self._open.pop((record.frontend, finish.number), None)
        if request is None or finish.times is None:
            return
        request.reason = finish.reason
        request.first_token, request.ended = finish.times.first_token, finish.times.ended
