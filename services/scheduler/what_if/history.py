"""Requests and steps of a recording: the load of a what-if, and the measurements of its cost model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from protocol.codec import unpack
from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams
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
from services.scheduler.recording import stand_ins
from services.scheduler.recording.records import (
    AppliedRecord,
    ArrivalRecord,
    OutcomeRecord,
    PlanRecord,
    RecordingHeader,
)
from services.scheduler.recording.replay import Turn, turns_of
from services.scheduler.recording.segments import EventRecording
from services.scheduler.what_if.cost import HostCost, StepCost, Vector, features_of, fit, host_features


@dataclass(eq=False)
class RecordedRequest:
    arrived: float
    """Seconds on the scheduler's clock, as all times here."""
    frontend: int
    message: GenerateRequest
    """With its tokens, or what stands in for them."""
    tokens: Column
    """Prompt and output, or what stands in for them."""
    length: int
    """Tokens, prompt and output, at its end."""
    first_token: float = 0.0
    ended: float = 0.0
    grammar_seconds: float | None = None
    """Time until its grammar was compiled; None: it has none."""
    blocks: list[bytes] = field(default_factory=list)
    """Names of its full blocks, in a recording without tokens."""
    is_refused: bool = False

    @property
    def num_outputs(self) -> int:
        return self.length - self.message.num_prompt_tokens


class Drafted(NamedTuple):
    """Drafts of one row with drafts."""

    verified: int
    accepted: int


_IDLE = 5e-5
"""Seconds between two turns of the scheduler in which it waited for a message."""


class MeasuredStep(NamedTuple):
    """Times of a step: those of the worker on its clock, `dispatched` and `returned` on the scheduler's."""

    features: Vector
    sending: Vector
    """`host_features` of its plan"""
    dispatched: float
    prepared: float
    began: float
    """The device was free and the plan was there."""
    ended: float
    returned: float
    free_since: float
    """The scheduler ended the turn before the one that read the result."""


@dataclass
class MeasuredTurn:
    """One turn of the scheduler's loop."""

    began: float
    worked: float = 0.0
    """Seconds; 0.0: not measured."""
    rows: int = 0
    requests: int = 0


@dataclass
class History:
    requests: list[RecordedRequest] = field(default_factory=list)
    steps: list[MeasuredStep] = field(default_factory=list)
    turns: list[MeasuredTurn] = field(default_factory=list)
    drafted: list[Drafted] = field(default_factory=list)
    num_preemptions: int = 0

    @classmethod
    def read(cls, recording: EventRecording) -> "History":
        """Raises: RecordingError"""
        reader = _HistoryReader(recording.header)
        for turn in turns_of(recording.records()):
            reader.take(turn)
        return reader.history

    def costs(self) -> Iterator[StepCost]:
        """Yield the best fit of the device's times, then those that are as good.

        Raises: ValueError, if there are too few steps.
        """
        times = [0.0, *(at for turn in self.turns for at in (turn.began, turn.began + turn.worked))]
        worked = np.cumsum([0.0, *(seconds for turn in self.turns for seconds in (0.0, turn.worked))])
        began, ended = np.array([(step.began, step.ended) for step in self.steps]).reshape(-1, 2).T
        shift = self._clock_difference()
        shared = [*np.interp(ended + shift, times, worked) - np.interp(began + shift, times, worked)]
        return StepCost.fits([step.features for step in self.steps], [*(ended - began)], shared)

    def host(self) -> HostCost:
        """Return the times beside the device. The way back is known where the scheduler waited for the result."""
        shift = self._clock_difference()
        turns = [(host_features(turn.rows, turn.requests), turn.worked) for turn in self.turns if turn.worked]
        sending = [(step.sending, step.prepared + shift - step.dispatched) for step in self.steps]
        awaited = [step for step in self.steps if step.returned - step.free_since > _IDLE]
        back = _median([step.returned - step.ended - shift for step in awaited])
        return HostCost(_fit(turns), _fit(sending), back)

    def _clock_difference(self) -> float:
        """Return the scheduler's clock less the worker's. They are the same clock on one machine; else the shortest
        ways there and back are assumed to be equal."""
        there = _median([step.prepared - step.dispatched for step in self.steps])
        back = _median([step.returned - step.ended for step in self.steps])
        return 0.0 if there > 0 and back > 0 else (back - there) / 2


def _median(seconds: list[float]) -> float:
    return float(np.median(seconds)) if seconds else 0.0


def _fit(measured: list[tuple[Vector, float]]) -> Vector:
    """Return the coefficients of features and seconds that give the total time, with its delays; 0 without any."""
    if not measured:
        return np.zeros(3)
    x, y = (np.array([features for features, _ in measured]), np.array([max(each, 1e-6) for _, each in measured]))
    solved = fit(x, y)[0]
    return solved * (y.sum() / (x @ solved).sum())


class _InFlight(NamedTuple):
    record: PlanRecord
    dispatched: float
    slots: list[int]
    """Slots of the sampling rows."""


class _HistoryReader:
    def __init__(self, header: RecordingHeader) -> None:
        self.history = History()
        self._header = header
        self._now = 0.0
        self._open: dict[RequestKey, RecordedRequest] = {}
        self._owners: dict[int, RecordedRequest] = {}
        self._in_flight: dict[tuple[int, int], _InFlight] = {}
        self._results: dict[tuple[int, int], ModelRunnerOutput] = {}
        self._last_sampled: tuple[int, int, float] = (0, 0, 0.0)
        """Epoch, step id and end of the step that returned last."""

    def take(self, turn: Turn) -> None:
        match turn.cause:
            case TimeAdvanced(now=now, worked=worked):
                if turns := self.history.turns:
                    turns[-1].worked = worked
                turns.append(MeasuredTurn(now))
                self._now = now
            case RequestArrived(frontend=frontend, message=message):
                self._arrive(frontend, message)
            case ArrivalRecord(frontend=frontend, blocks=blocks):
                message = stand_ins.arrival(turn.cause, self._header.vocab_size)
                self._arrive(frontend, message, stand_ins.block_names(blocks))
            case GrammarReady(request=key) if key in self._open:
                self._open[key].grammar_seconds = self._now - self._open[key].arrived
            case ResultArrived(result=result):
                self._results[result.epoch, result.step_id] = result
                self._measure(result)
        work = self.history.turns[-1] if self.history.turns else MeasuredTurn(self._now)
        work.requests += isinstance(turn.cause, (RequestArrived, ArrivalRecord))
        for record in turn.decisions:
            match record:
                case PlanRecord():
                    work.rows += len(record.plan.slots) // 4
                    work.requests += len(record.plan.new)
                    self._dispatched(record)
                case AppliedRecord():
                    work.rows += len(record.counts) // 4
                    self._applied(record, turn.outcomes.get((record.epoch, record.step_id)))
                case RequestRefused(frontend=frontend, finish=finish):
                    if (request := self._open.pop((frontend, finish.number), None)) is not None:
                        request.is_refused = True
                case RequestFinished():
                    work.requests += 1
                    self._finished(record)
                case RequestPreempted():
                    self.history.num_preemptions += 1

    def _arrive(self, frontend: int, message: GenerateRequest, blocks: Iterable[bytes] = ()) -> None:
        if len(message.token_ids) % 4:
            return  # malformed: the scheduler dropped it
        tokens = unpack(message.token_ids)
        request = RecordedRequest(self._now, frontend, message, tokens, len(tokens), blocks=[*blocks])
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
        if step is None or not times.prepared or times.sampled <= times.forward_began:
            return
        plan = step.record.plan
        epoch, before, sampled = self._last_sampled
        began = max(times.prepared, sampled if (epoch, before + 1) == key else 0.0)
        if self._header.limits.stages > 1:  # until then it may wait for the stage before
            began = times.forward_began
        drafted = unpack(result.drafted) if result.drafted else np.zeros(len(step.slots), np.int32)
        if not plan.has_structured_output_requests:  # its time includes the wait for the masks
            features = (features_of(plan, drafted), host_features(len(plan.slots) // 4, len(plan.new)))
            free_since = h.turns[-2].began + h.turns[-2].worked if len(h.turns) > 1 else 0.0
            measured = (step.dispatched, times.prepared, began, times.sampled, self._now, free_since)
            h.steps.append(MeasuredStep(*features, *measured))
        self._last_sampled = (*key, times.sampled)
        if plan.drafts:
            planned = unpack(plan.drafts)[np.frombuffer(plan.samples, np.bool_)]
            columns = (planned, drafted, unpack(result.counts))
            for most, verified, count in zip(*(column.tolist() for column in columns), strict=True):
                if most and count:  # a row without tokens was left out
                    h.drafted.append(Drafted(verified, count - 1))

    def _applied(self, record: AppliedRecord, outcome: OutcomeRecord | None) -> None:
        key = (record.epoch, record.step_id)
        step, result = self._in_flight.pop(key, None), self._results.pop(key, None)
        if step is None or result is None:
            return
        widths, counts, at = unpack(result.counts), unpack(record.counts).tolist(), 0
        ids, owners = unpack(result.token_ids), [self._owners.get(slot) for slot in step.slots]
        if outcome is not None:
            params = (SamplingParams(1) if owner is None else owner.message.params for owner in owners)
            fillers = [stand_ins.filler(each, self._header.vocab_size) for each in params]
            ids = stand_ins.outputs(widths, fillers, outcome)
            for slot, name in stand_ins.filled_blocks(outcome):
                if (filled := self._owners.get(slot)) is not None:
                    filled.blocks.append(name)
        for owner, width, count in zip(owners, widths.tolist(), counts, strict=True):
            if owner is not None and count:
                owner.tokens = np.concatenate((owner.tokens, ids[at : at + count]))
                owner.length += count
            at += width

    def _finished(self, record: RequestFinished) -> None:
        finish = record.finish
        request = self._open.pop((record.frontend, finish.number), None)
        if request is None or finish.times is None:
            return
        request.first_token, request.ended = finish.times.first_token, finish.times.ended
