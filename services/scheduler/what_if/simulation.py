"""Recorded arrivals through the production core, with a modelled device instead of workers.

The clock is virtual. A request has its recorded prompt, and ends behind its recorded number of tokens in the recorded
way. Masks take no time, and a step waits for all of its masks. Losses of workers, resets of the prefix cache and
refused requests are left out, and so are requests that are longer than the context to try.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from protocol.codec import pack, unpack
from protocol.media import MediaModel
from protocol.membership import Loaded
from protocol.pooling import PoolingModel
from protocol.requests import Finish, FinishReason
from protocol.sampling import Pooling
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepTimes
from services.config import SchedulerConfig
from services.scheduler.build import CoreFactory, CoreStart
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import Event, RequestFinished, StepDispatched
from services.scheduler.core.request import RequestKey
from services.scheduler.core.slots import LIVE, Column, SlotIds
from services.scheduler.membership.sizes import GroupError, fit
from services.scheduler.recording.grammar import RecordedCompiler, RecordedGrammar
from services.scheduler.recording.records import RecordingHeader
from services.scheduler.what_if.cost import HostCost, StepCost, features_of, host_features
from services.scheduler.what_if.history import Drafted, History, RecordedRequest
from services.scheduler.what_if.measurements import Measurements, RequestMeasurement


def limits_for(header: RecordingHeader, config: SchedulerConfig) -> Limits:
    """Return the sizes that the recorded workers would give; a number of blocks that is set is assumed to fit.

    Raises: ValueError, if the context does not fit the blocks, or the policy does not serve the model.
    """
    recorded = header.limits
    blocks = max(recorded.num_blocks, config.num_gpu_blocks_override or 0)
    pooling = PoolingModel("embed", header.hidden_size, recorded.whole_prompts) if recorded.pools_only else None
    media = MediaModel("") if recorded.encoder_budget else None
    model = (header.vocab_size, recorded.max_model_len, 0, blocks)
    loaded = Loaded("", *model, groups=recorded.groups, pooling=pooling, media=media)
    try:
        return fit(config, [loaded], recorded.leaves_rows_out)
    except GroupError as error:
        raise ValueError(str(error)) from None


_SEED = 0
"""Seed of the draws of accepted drafts."""
_ALL_MATCH = 1 << 30


class ModelledDevice(NamedTuple):
    """Modelled times of the workers."""

    cost: StepCost
    host: HostCost
    acceptance: float | None
    """Chance of a draft to be accepted; None: as recorded."""
    found: float = 0.5
    """With a chance: the share of rejected drafts that were verified; the others were not found and cost nothing."""


@dataclass(eq=False)
class ModelledStep:
    plan: SchedulerOutput
    step: InflightStep
    drafted: Column
    """int32[sampling rows], as `accepted`"""
    accepted: Column
    missing: set[int]
    """Slots whose masks its sampling waits for."""
    prepared: float
    began: float
    end: float


class WhatIf:
    def __init__(
        self, header: RecordingHeader, config: SchedulerConfig, limits: Limits, history: History, device: ModelledDevice
    ) -> None:
        """
        Args:
            config, limits: the settings to try.

        Raises: ValueError, if the policy cannot be used.
        """
        self._history, self._device, self._hidden_size = history, device, header.hidden_size
        self._max_model_len = limits.max_model_len
        start = CoreStart(limits, header.epoch, header.vocab_size, header.hidden_size, RecordedCompiler())
        self.core = CoreFactory(config).core(start)
        self.core.observers.add(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._free = [0.0] * limits.stages
        """Time at which each pipeline stage is free."""
        self._steps: dict[int, InflightStep] = {}
        self._executing: deque[ModelledStep] = deque()
        self._open: dict[RequestKey, RecordedRequest] = {}
        self._rng = Random(_SEED)  # noqa: S311  no secret
        self.measurements = Measurements()
        self._rows = self._requests = 0

    def run(self) -> Measurements:
        """Serve all requests."""
        for request in self._history.requests:
            if request.is_refused or request.length <= 0:
                continue
            if request.length > self._max_model_len:
                self.measurements.num_refused += 1
                continue
            self._at(request.arrived, self._arrival(request))
        free = worked = 0.0
        while (due := self._next()[0]) < math.inf:
            now = max(due, free)  # the scheduler's work before has ended
            self._rows = self._requests = 0  # of this turn
            self.core.take_outputs()
            self.core.advance(now, worked)
            while (following := self._next())[0] <= now:
                self._deliver() if following[1] else heapq.heappop(self._events)[2]()
            for message in self.core.dispatch():
                if isinstance(message, SchedulerOutput):
                    self._execute(message, now)
                elif isinstance(message, GrammarOutput):
                    self._sample(message, now)
            worked = float(host_features(self._rows, self._requests) @ self._device.host.turn)
            self._share(now, worked)
            free = now + worked
        self.measurements.num_preemptions = self.core.store.counters["num_preemptions"]
        return self.measurements

    def observe(self, event: Event) -> None:
        match event:
            case StepDispatched(step=step):
                self._steps[step.step_id] = step
            case RequestFinished(frontend=frontend, finish=finish):
                self._finished((frontend, finish.number), finish)

    def _next(self) -> tuple[float, bool]:
        """Return the time of what happens next, inf if nothing does, and whether it is a result."""
        event = self._events[0][0] if self._events else math.inf
        first = self._executing[0] if self._executing else None
        result = math.inf if first is None or first.missing else first.end + self._device.host.returning
        return min(event, result), result < event

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, action))

    # -- requests ------------------------------------------------------------------------------------------------

    def _arrival(self, request: RecordedRequest) -> Callable[[], None]:
        def arrive() -> None:
            key = (request.frontend, request.message.number)
            if key in self._open:  # still open here: the frontend uses the number for two requests
                self._at(self.core.store.now + 1e-3, arrive)
                return
            self._open[key] = request
            self._requests += 1
            self.core.add(request.frontend, request.message)
            if (added := self.core.requests.get(key)) is None:
                del self._open[key]
                self.measurements.num_refused += 1
                return
            added.block_hashes = [*request.blocks]
            if request.message.structured is not None:
                *_, ticket = self.core.store.compiling.by_ticket
                self._at(
                    self.core.store.now + (request.grammar_seconds or 0.0),
                    lambda: self.core.on_grammar(ticket, RecordedGrammar(_ALL_MATCH)),
                )
            if not request.num_outputs and request.message.pooling is Pooling.NONE:
                delay = max(request.ended - request.arrived, 0.0)
                self._at(self.core.store.now + delay, lambda: self.core.abort(key[0], [key[1]]))

        return arrive

    def _finished(self, key: RequestKey, finish: Finish) -> None:
        request = self._open.pop(key, None)
        if request is None or finish.times is None or finish.reason is FinishReason.REJECTED:
            return
        times, self._requests = finish.times, self._requests + 1
        measured = RequestMeasurement(times.queued, times.first_token, times.ended, request.num_outputs)
        self.measurements.requests.append(measured)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _execute(self, plan: SchedulerOutput, now: float) -> None:
        step, d = self._steps.pop(plan.step_id), self._device
        drafts = step.drafts[step.samples]
        drafted, accepted = np.zeros((2, len(drafts)), np.int32)
        for row in np.flatnonzero(drafts).tolist():
            drafted[row], accepted[row] = self._draft(int(drafts[row]))
        self._rows += len(step.slots)
        self._requests += len(plan.new)
        seconds = d.cost.of(features_of(plan, drafted))
        end = prepared = now + float(host_features(len(step.slots), len(plan.new)) @ d.host.sending)
        for stage, free in enumerate(self._free):
            end = self._free[stage] = max(end, free) + seconds
        missing = set(unpack(plan.masked).tolist()) if plan.has_structured_output_requests else set()
        times = (prepared, end - seconds, end)
        self._executing.append(ModelledStep(plan, step, drafted, accepted, missing, *times))

    def _share(self, now: float, worked: float) -> None:
        """Make the steps longer that run while the scheduler works from now on, and those behind them later."""
        longer = 0.0
        for executed in self._executing:
            if executed.began > now:
                executed.began += longer
            executed.end += longer
            beside = min(now + worked, executed.end) - max(now, executed.began)
            if beside > 0:
                executed.end += self._device.cost.shared * beside
                longer += self._device.cost.shared * beside
        self._free[-1] += longer

    def _sample(self, message: GrammarOutput, now: float) -> None:
        executed = next(each for each in self._executing if each.plan.step_id == message.step_id)
        executed.missing.difference_update(unpack(message.slots).tolist())
        executed.end = max(executed.end, now + float(self._device.host.sending[0]))
        self._free[-1] = max(self._free[-1], executed.end)

    def _deliver(self) -> None:
        executed = self._executing.popleft()
        plan, step, drafted, accepted = executed.plan, executed.step, executed.drafted, executed.accepted
        rows, slots = step.slots[step.samples], self.core.epoch.slots
        self._rows += len(rows)
        counts = accepted + 1
        parts = [self._tokens(slot, count) for slot, count in zip(rows.tolist(), counts.tolist(), strict=True)]
        pooling = rows[slots.pooling.take(rows)]
        self.core.on_result(
            ModelRunnerOutput(
                plan.epoch,
                plan.step_id,
                pack(rows.astype(np.int32)),
                pack(step.generations[step.samples]),
                pack(counts),
                b"".join(map(pack, parts)),
                StepTimes(0.0, executed.prepared, executed.began, executed.end, executed.end),
                embedding_slots=pack(pooling.astype(np.int32)),
                embeddings=bytes(4 * len(pooling) * self._hidden_size),
                drafted=pack(drafted) if drafted.any() else b"",
                draft_token_ids=bytes(4 * len(rows) * step.proposes) if plan.has_structured_output_requests else b"",
            )
        )
        self._abort_due(rows)

    def _draft(self, planned: int) -> tuple[int, int]:
        """Return how many drafts of a row are verified, and how many of them are accepted."""
        chance, recorded = self._device.acceptance, self._history.drafted
        if chance is None:
            drawn = self._rng.choice(recorded or [Drafted(0, 0)])
            return min(drawn.verified, planned), min(drawn.accepted, planned)
        accepted = 0
        while accepted < planned and self._rng.random() < chance:
            accepted += 1
        rejected = sum(self._rng.random() < self._device.found for _ in range(planned - accepted))
        return accepted + rejected, accepted

    def _tokens(self, slot: int, count: int) -> Column:
        """Return the next tokens of the request in a slot."""
        slots, tokens = self.core.epoch.slots, np.zeros(count, np.int32)
        owner = slots.owner[slot]
        request = self._open.get(owner.key) if owner is not None else None
        if request is not None:
            first = int(slots.tokens[slot])
            part = request.tokens[first : first + count]
            tokens[: len(part)] = part
        return tokens

    def _abort_due(self, rows: SlotIds) -> None:
        """Abort the requests that have all tokens that they got before they were aborted."""
        slots = self.core.epoch.slots
        for slot in rows.tolist():
            owner = slots.owner[slot]
            if owner is None or owner.finished or slots.state[slot] != LIVE:
                continue
            request = self._open.get(owner.key)
            if request is not None and slots.tokens[slot] >= request.length:
                self.core.abort(owner.frontend, [owner.number])
