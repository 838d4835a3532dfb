"""The simulated world with a rigid device: padded shapes, one phase a step, prefill progress of its own.

The worker computes its shapes by walking over windows and rectangles, unlike `policies/geometry.py`, so that one checks
the other. The rules of the phased policy are checked with every plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import msgspec.structs
import numpy as np

from protocol.codec import pack, unpack
from protocol.steps import ModelRunnerOutput, NewRequest, SchedulerOutput
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import StepDispatched
from services.scheduler.core.slots import LIVE
from services.scheduler.policies import BatchingPolicy
from services.scheduler.policies.geometry import Geometry
from services.scheduler.policies.phased import PhasedPolicy
from tests.simulation.invariants import Checker, demand
from tests.simulation.oracle import OracleWorker, Row, Sampling, SentMasks
from tests.simulation.parameters import MATRIX, OTHERS, with_parameters
from tests.simulation.step_checks import StepChecks
from tests.simulation.world import World, params

Progress = Callable[[int, int, int], int]
"""(start, planned end, furthest possible end) of a chunk -> position at which the device ends it."""


def as_scheduled(_start: int, end: int, _most: int) -> int:
    return end


def windows(tokens: int, block: int, chunk: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) of the tokens in each chunk of a prompt, walking back from its padded end."""
    end = tokens + -tokens % block
    spans = []
    while end > 0:
        spans.append((max(0, end - chunk), min(tokens, end)))
        end -= chunk
    return spans[::-1]


def rectangle(lengths: Sequence[int], block: int) -> int:
    """Return the longest row when the blocks of all rows end at the same column."""
    columns = max(-(-length // block) for length in lengths)
    return max((columns - -(-length // block)) * block + length for length in lengths)


class RigidWorker(OracleWorker):
    """An oracle that refuses steps a rigid device cannot run. `progress` decides where each chunk ends."""

    def __init__(
        self, limits: Limits, vocab: int, max_volume: int = 0, progress: Progress = as_scheduled, epoch: int = 1
    ) -> None:
        super().__init__(limits, vocab, epoch)
        self.limits, self.max_volume, self.progress = limits, max_volume, progress
        self.tkv: dict[int, int] = {}
        """Decode step -> longest row."""
        self._entry: dict[int, int] = {}
        self._prefilled: dict[int, int] = {}
        """Slot -> step that computed its last chunk."""
        self._void: set[int] = set()
        """Slots whose rows are void until the next generation."""
        self._mid: set[int] = set()
        """Slots whose next chunk may begin inside a window."""

    def _enter(self, new: NewRequest) -> None:
        super()._enter(new)
        self._entry[new.slot] = len(new.token_ids) // 4
        self._void.discard(new.slot)
        self._mid.discard(new.slot)

    def _execute(self, plan: SchedulerOutput) -> Sampling:
        rows = self._begin(plan)
        prefills = [row for row in rows if row[2] < self._entry[row[0]]]
        self._demand(not prefills or len(rows) == 1, f"unmixed step: {len(prefills)} prefills among {len(rows)} rows")
        if not prefills:
            self._shape(plan.step_id, [row[2] + 1 for row in rows])
            for slot, *_ in rows:
                self._demand(
                    self._prefilled[slot] <= self.confirmed, f"processed prefill: slot {slot} decodes too early"
                )
            return self._compute(plan, rows)
        [(slot, generation, start, count, samples)] = prefills
        held = self.slots[slot]
        if slot in self._void and generation == held.generation:
            void = self._result(plan, [(slot, generation)] if samples else [], [0] if samples else [], [])
            return lambda _: void
        if slot in self._void:
            self._demand(generation == held.generation + 1, f"slot {slot}: generation {generation} after a rollback")
            held.generation = self._generations[slot] = generation
            self._void.discard(slot)
        self._check_window(slot, start, start + count)
        return self._prefill(plan, slot, generation, start, start + count, samples)

    def _check_window(self, slot: int, start: int, end: int) -> None:
        spans = windows(self._entry[slot], self.block_size, self.limits.max_num_batched_tokens)
        first, last = next(span for span in spans if span[0] <= start < span[1])
        self._demand(start == first or slot in self._mid, f"slot {slot}: chunk from {start} inside {first}-{last}")
        self._demand(end == last, f"slot {slot}: chunk to {end}, but its window ends at {last}")
        self._mid.discard(slot)

    def _prefill(
        self, plan: SchedulerOutput, slot: int, generation: int, start: int, end: int, samples: bool
    ) -> Sampling:
        most = end if samples else min(self._entry[slot] - 1, len(self.slots[slot].table) * self.block_size)
        reached = self.progress(start, end, most)
        if reached == end and samples:
            self._prefilled[slot] = plan.step_id
        if reached != end:
            self._void.add(slot)
            self._mid.add(slot)
        self._write(slot, generation, start, reached - start, samples and reached == end)
        self._read(slot, 0, 0, reached)
        report = [(slot, reached)]
        if samples and reached < end:
            return lambda _: self._unsampled(plan, (slot, generation), report)
        rows = [(slot, generation)] if samples else []
        return lambda grammar: _with_progress(self._sample(plan, rows, grammar), report)

    def _shape(self, step_id: int, lengths: list[int]) -> None:
        tkv = self.tkv[step_id] = rectangle(lengths, self.block_size)
        self._demand(tkv <= self.limits.max_model_len, f"volume limit: tkv {tkv} beyond {self.limits.max_model_len}")
        if self.max_volume:
            self._demand(len(lengths) * tkv <= self.max_volume, f"volume limit: {len(lengths)} rows of {tkv}")

    def _compute(self, plan: SchedulerOutput, rows: list[tuple[int, int, int, int, bool]]) -> Sampling:
        for slot, generation, start, count, samples in rows:
            self._demand(slot not in self._void, f"slot {slot} decodes after a rollback")
            self._write(slot, generation, start, count, samples)
        for slot, _, start, count, _ in rows:
            self._read(slot, 0, start, start + count)
        return lambda grammar: self._sample(plan, [(row[0], row[1]) for row in rows], grammar)

    def _unsampled(self, plan: SchedulerOutput, row: Row, report: list[tuple[int, int]]) -> ModelRunnerOutput:
        """Return the result of a chunk that ended before the token to be sampled."""
        result = self._sample(plan, [], SentMasks([]))
        empty = self._result(plan, [row], [0], report)
        return msgspec.structs.replace(empty, logprobs=result.logprobs)

    @staticmethod
    def _result(
        plan: SchedulerOutput, rows: list[Row], counts: list[int], report: list[tuple[int, int]]
    ) -> ModelRunnerOutput:
        """Return a result of rows without tokens."""
        empty = ModelRunnerOutput(
            plan.epoch,
            plan.step_id,
            pack([slot for slot, _ in rows]),
            pack([generation for _, generation in rows]),
            pack(counts),
            b"",
        )
        return _with_progress(empty, report)


def _with_progress(result: ModelRunnerOutput, report: list[tuple[int, int]]) -> ModelRunnerOutput:
    slots, frontiers = [slot for slot, _ in report], [frontier for _, frontier in report]
    return msgspec.structs.replace(result, progress_slots=pack(slots), progress_frontiers=pack(frontiers))


class RigidChecker(Checker):
    """The same invariants without entries of a generation that was rolled back: they count for nothing."""

    def _steps_in_flight(self) -> list[InflightStep]:
        return [self._without_void(step) for step in super()._steps_in_flight()]

    def _without_void(self, step: InflightStep) -> InflightStep:
        """Drop void entries of live slots. Entries of retired slots stay, for the fence, but promise nothing."""
        slots, current = self.epoch.slots, self.epoch.ledger.current(step)
        kept = current | (slots.state.take(step.slots) != LIVE)
        return InflightStep(
            step.step_id,
            step.slots[kept],
            slots.generation.take(step.slots[kept]),
            step.starts[kept],
            step.counts[kept],
            (step.samples & current)[kept],
            step.drafts[kept],
            int(step.counts[kept].sum()),
        )


class RigidStepChecks(StepChecks):
    """Also the rules of the phased policy."""

    world: "RigidWorld"

    def _on_dispatched(self, event: StepDispatched) -> None:
        super()._on_dispatched(event)
        world, step, s = self.world, event.step, self.world.epoch.slots
        able = self.decodable(step)
        kind = "P" if step.starts[0] < s.entry[step.slots[0]] else "D"
        if world.interleave and kind == "P" and world.kinds[-1:] == ["P"]:
            demand(not able, "interleaving", f"two prefills in a row while slots {able} could decode")
        if kind == "D":
            self._coverage["paused"] += bool(able)
        world.kinds.append(kind)
        rows = world.epoch.running
        part = rows[(s.computed[rows] < s.entry[rows]) & (s.computed[rows] > 0)]
        is_single = len(part) <= 1 or world.store.counters["rollbacks_total"] > 0
        demand(is_single, "single prefill", f"slots {part} in prefill")
        self._check_reservations()

    def _check_reservations(self) -> None:
        """Block reservation: the blocks that running requests may still need are free."""
        epoch, size = self.world.epoch, self.world.limits.block_size
        s, pool = epoch.slots, epoch.kv.pool
        owed = 0
        for slot in epoch.running.tolist():
            needed = -(-(int(s.limit[slot]) - 1) // size)
            owed += max(0, needed - len(epoch.kv.tables[slot]))
        demand(0 <= owed <= pool.num_free, "block reservation", f"{owed} blocks are reserved, {pool.num_free} are free")

    def _on_updated(self, step: InflightStep) -> None:
        s = self.world.epoch.slots
        for slot in step.slots.tolist():
            if s.state[slot] == LIVE and s.tokens[slot] == s.entry[slot] + 1:
                committed = int(s.committed(np.array([slot]))[0])
                demand(committed >= int(s.entry[slot]), "prefill progress", f"slot {slot} was prefilled to {committed}")
        super()._on_updated(step)


class RigidWorld(World):
    """A world with a phased policy and a device that requires it."""

    step_checks = RigidStepChecks

    def __init__(
        self,
        limits: Limits,
        depth: int,
        use_priority: bool = False,
        interleave: bool = True,
        max_volume: int = 0,
        pausing: bool = False,
        progress: Progress = as_scheduled,
        policy: BatchingPolicy | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.interleave, self.max_volume, self.pausing, self.progress = (interleave, max_volume, pausing, progress)
        self.geometry = Geometry(limits.block_size, limits.max_num_batched_tokens)
        self.kinds: list[str] = []
        """One letter per step: P for prefill, D for decode."""
        policy = policy or PhasedPolicy(limits, interleave, max_volume, pausing)
        super().__init__(limits, depth, use_priority=use_priority, policy=policy, trace=trace, conserves_work=False)
        self.worker = RigidWorker(limits, self.vocab, max_volume, progress)
        self.checker = RigidChecker(self.engine)

    def replace_workers(self) -> None:
        """End the epoch, and start one of workers with the same shapes."""
        self.end_epoch()
        limits = self.limits
        self.start_epoch(limits, PhasedPolicy(limits, self.interleave, self.max_volume, self.pausing))
        self.worker = RigidWorker(limits, self.vocab, self.max_volume, self.progress, self.epoch.number)
        self.kinds.append("|")

    def dispatch(self) -> int:
        before = len(self.plans)
        sent = super().dispatch()
        for plan in self.plans[before:]:
            actual = self.worker.tkv.get(plan.step_id)  # type: ignore[attr-defined]
            if actual is not None:  # predicted from steps in flight, not from reports
                predicted = self.geometry.tkv(unpack(plan.starts) + 1)
                demand(
                    predicted >= actual, "predicted length", f"step {plan.step_id}: tkv {predicted}, actual {actual}"
                )
        return sent


def limits(**changes: int | bool) -> Limits:
    """Return limits with blocks of 4, chunks of 8 and room for all requests."""
    base = Limits(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=64, num_blocks=128, block_size=4)
    return replace(base, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RandomWorkload:
    """A random workload for the rigid world."""

    limits: Limits
    interleave: bool
    max_volume: int
    pausing: bool
    unplanned: float
    """Share of the chunks that end elsewhere than planned."""
    use_priority: bool
    arrivals: int
    aborts: float
    resets: float
    losses: float
    """Probabilities per round of an abort, a cache reset, and the loss of all workers."""


def draw(seed: int, stages: int = 1) -> RandomWorkload:
    rng = Random(f"rigid/{seed}")
    block = rng.choice((2, 4, 4))
    longest = rng.choice((24, 37, 48, 61))
    blocks = -(-longest // block) + rng.choice((0, 4, 24, 64))
    least = -(-longest // block) * block + block
    return RandomWorkload(
        limits=Limits(
            max_num_seqs=rng.choice((1, 2, 4, 8)),
            max_num_batched_tokens=block * rng.choice((1, 2, 2, 3, 5)),
            max_model_len=longest,
            num_blocks=blocks,
            block_size=block,
            enable_prefix_caching=rng.random() < 0.8,
            stages=stages,
        ),
        interleave=rng.random() < 0.7,
        max_volume=rng.choice((0, least, least + rng.randint(0, 120))),
        pausing=rng.random() < 0.4,
        unplanned=rng.choice((0.0, 0.0, 0.3, 0.8)),
        use_priority=rng.random() < 0.3,
        arrivals=rng.randint(3, 12),
        aborts=rng.choice((0.0, 0.05)),
        resets=rng.choice((0.0, 0.0, 0.03)),
        losses=rng.choice((0.0, 0.0, 0.0, 0.03)),
    )


def play(seed: int, depth: int, stages: int = 1, trace: Callable[[str], None] | None = None) -> RigidWorld:
    """Play a random workload to its end.

    Raises: AssertionError, with the name of the broken rule.
    """
    load, rng = draw(seed, stages), Random(f"rigid/{seed}/{depth}")
    device = Random(f"device/{seed}/{depth}")
    shared = [rng.randrange(64) for _ in range(load.limits.max_model_len)]

    def progress(start: int, end: int, most: int) -> int:
        return device.randint(start + 1, most) if device.random() < load.unplanned else end

    world = RigidWorld(
        load.limits,
        depth,
        use_priority=load.use_priority,
        interleave=load.interleave,
        max_volume=load.max_volume,
        pausing=load.pausing,
        progress=progress,
        trace=trace,
    )
    left, of_parameters = load.arrivals, Random(f"parameters/{seed}")
    names = (*MATRIX, *OTHERS) if of_parameters.random() < 0.4 else ("none",)
    for _ in range(3000):
        while left and rng.random() < 0.3:
            left -= 1
            length = rng.randint(1, load.limits.max_model_len - 1 if rng.random() < 0.2 else 24)
            length = min(length, load.limits.max_model_len - 1)
            kept = rng.choice((0, length // 2, length))
            prompt = shared[:kept] + [rng.randrange(64) for _ in range(length - kept)]
            stop = rng.sample(range(64), rng.choice((0, 2)))
            base, name = params(rng.randint(1, 16), *stop), of_parameters.choice(names)
            sampling, grammar = with_parameters(name, base, of_parameters, 64)
            world.add(prompt, sampling, priority=rng.choice((0, 0, 1, -1)), structured=grammar)
        while world.compilation.waiting and of_parameters.random() < 0.5:
            world.compiled()
        alive = [stream for stream in world.streams if stream.open]
        if alive and rng.random() < load.aborts:
            world.abort(rng.choice(alive))
        if rng.random() < load.resets:
            world.reset_prefix_cache(reset_running=rng.random() < 0.7)
        if rng.random() < load.losses:
            world.replace_workers()
        if stages > 1 and rng.random() < 0.7:
            world.tick()
        if world.pending and rng.random() < 0.7:
            world.complete(rng.randrange(len(world.pending)) if rng.random() < 0.2 else 0)
        world.dispatch()
        if world.orphans and rng.random() < 0.5:
            world.late_result()
        if not left and not world.engine.requests and not world.pending and not len(world.engine.queue):
            world.drain()
            return world
    raise AssertionError("liveness: not finished")
