"""Checks of each step when the core forms it and when its result is applied, and counts of what happened."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from protocol.rows import ResultRows
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.observer import (
    DispatchStarted,
    Event,
    PreemptionCause,
    RequestPreempted,
    ResultApplied,
    StepDispatched,
)
from services.scheduler.core.slots import DELIVER, DROP, LIVE
from services.scheduler.policies import PhasedPolicy
from tests.simulation.answer_checks import SimulatedStream
from tests.simulation.invariants import demand

if TYPE_CHECKING:
    from tests.simulation.world import World


class StepChecks:
    """Observes the core of a world."""

    def __init__(self, world: "World") -> None:
        self.world, self._coverage = world, world.coverage
        self.admitting = True
        """True: no request was preempted since the last step was dispatched; False: the next step admits nobody."""
        self.rows: dict[int, list[SimulatedStream]] = {}
        """step_id -> streams of its sampling rows, of steps in flight."""

    def observe(self, event: Event) -> None:
        """Check a decision of the core when it is made."""
        match event:
            case DispatchStarted():
                self.admitting = True
            case StepDispatched():
                self._on_dispatched(event)
                self.admitting = True
            case RequestPreempted(cause=cause):
                self.admitting = False
                self._coverage["displacements"] += cause is PreemptionCause.PRIORITY
            case ResultApplied():
                self._on_applied(event)

    def _on_dispatched(self, event: StepDispatched) -> None:
        world, step, plan = self.world, event.step, event.plan
        world.checker.on_scheduled(step)
        entering = {new.slot for new in plan.new}
        world.policy.check(step, world.epoch.slots, entering)
        streams = [world.by_request[world.epoch.slots.request(slot)] for slot in step.slots.tolist()]
        self.rows[step.step_id] = [s for s, samples in zip(streams, step.samples, strict=True) if samples]
        columns = (step.slots, step.starts, step.counts, step.samples, step.drafts)
        rows = [column.tolist() for column in columns]
        for stream, slot, start, count, samples, drafts in zip(streams, *rows, strict=True):
            if slot in entering and not stream.request.reads_prefix_cache:
                assert start == 0, f"{stream.number} must read no prefix cache"
            stream.hit = start if not stream.steps else stream.hit
            stream.scheduled += count
            stream.planned_drafts += drafts
            stream.steps += 1
            self._coverage["prefix hits"] += start > 0 and slot in entering
            self._coverage["chunked prefills"] += not samples
            self._coverage["resumed"] += slot in entering and stream.steps > 1
            self._coverage["resumed in another epoch"] += slot in entering and stream.voids > 0
            self._coverage["prefix hits in another epoch"] += start > 0 and slot in entering and plan.epoch > 1
        head, total = world.store.waiting.head(), int(step.counts.sum())
        if world.limits.whole_prompts and head is not None and total < world.limits.max_num_batched_tokens:
            is_long = total + len(head.token_ids) > world.limits.max_num_batched_tokens
            self._coverage["whole prompts that wait for the next step"] += is_long
        if world.trace is not None:
            world.log("step", step.step_id, *zip(*rows, strict=True), "new", sorted(entering))
        world.checker.check()

    def on_nothing_scheduled(self) -> None:
        """Requests exist and the queue has room, but no step was formed."""
        if self.world.conserves_work and self.admitting:
            self.world.checker.on_idle(self.world.policy.shown)
        elif isinstance(self.world.policy.policy, PhasedPolicy) and not self.world.store.suspects.active:
            able = self.decodable(None)
            demand(not able, "work conservation", f"slots {able} could decode, but nothing was scheduled")

    def decodable(self, step: InflightStep | None) -> list[int]:
        """Return slots that could have been in the step and are not."""
        epoch, stages = self.world.epoch, self.world.limits.stages
        s = epoch.slots
        named = set() if step is None else set(step.slots.tolist())
        at = epoch.next_step if step is None else step.step_id
        able = []
        for slot in epoch.running.tolist():
            total, promised = int(s.tokens[slot]), int(s.tokens[slot] + s.placeholders[slot])
            under_way = promised > total and stages > 1 and at - s.sampled_step[slot] < stages
            if total > s.entry[slot] and promised < s.limit[slot] and slot not in named and not under_way:
                able.append(slot)
        return able

    def _on_applied(self, event: ResultApplied) -> None:
        """Count verified and accepted drafts of the rows whose result was used; check the state after the result."""
        self._on_failed({*self.world.worker.failed.pop(event.step.step_id, {}).values()}, event.ended)
        result = ResultRows.from_message(event.result)
        columns = (event.states, result.counts, result.drafted, event.counts)
        streams = self.rows.pop(event.step.step_id)
        for stream, state, count, drafted, appended in zip(
            streams, *(column.tolist() for column in columns), strict=True
        ):
            if not count and self.world.limits.leaves_rows_out:
                self._on_left_out(stream, state)
            if state == DROP:
                continue
            stream.drafted += drafted
            stream.accepted += max(count - 1, 0)
            self._coverage["drafts: rows cut by a stop"] += self._ends_within(stream, count, appended)
            if state == DELIVER:
                self._coverage["stale deliveries"] += 1
                self._coverage["drafts: stale rows of several tokens"] += count > 1
                self._coverage["stops while preempted"] += stream.key in event.ended
        self._on_updated(event.step)

    def _on_failed(self, digests: set[str], ended: Collection[tuple[int, int]]) -> None:
        """The requests of adapters that could not be loaded have ended, and no other ones."""
        for request in self.world.engine.requests.values():
            if request.lora is not None and request.lora.digest in digests:
                assert request.finished, f"{request.number} goes on without its adapter"
                self.world.by_request[request].doomed |= request.key in ended
                self._coverage["adapters: failed"] += 1
                self._coverage["adapters: failed after a preemption"] += request.num_preemptions > 0

    def _on_left_out(self, stream: SimulatedStream, state: int) -> None:
        self._coverage[f"left out: {('free', 'live', 'delivered', 'dropped')[state]}"] += 1
        self._coverage["left out: with a recurrent state"] += self.world.limits.takes_back_states
        stream.in_vain += state == LIVE

    def _ends_within(self, stream: SimulatedStream, count: int, appended: int) -> bool:
        """Return whether the answer ends before the last of the row's `count` tokens; `appended` of them were taken."""
        assert stream.request is not None
        s, request = self.world.epoch.slots, stream.request
        known = int(s.tokens[request.slot]) if request.slot >= 0 else len(request.token_ids)
        return known - appended + count > len(stream.prompt) + len(stream.answer.tokens)

    def _on_updated(self, step: InflightStep) -> None:
        self.world.checker.on_processed(step)
        self.world.check()
