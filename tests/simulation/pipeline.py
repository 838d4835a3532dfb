"""A discrete-event simulation of pipeline stages under the production engine, scheduler and policy.

Entities: stages and the links between them, each serving one step after the other in order of dispatch; the engine,
which takes no time itself; requests that arrive at given times. Events are arrivals and results. Between two events
every station serves first come, first served, so the times of a step follow from those of the steps before it. The
clock is a number; nothing sleeps.

A stage begins a step when it is free, when the step's activations are there (on the first stage: its plan), and on the
first stage also when the token that the last stage sampled for each of its rows is there.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.requests import FinishReason
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.policies import BatchingPolicy
from tests.simulation.requests import generate, plans
from tests.simulation.results import result_of

Seconds = NDArray[np.float64]

VOCAB = 1 << 16


@dataclass(frozen=True)
class Costs:
    """Times of one stage and one link, in seconds."""

    base: float = 0.0
    """Fixed time of a step."""
    weights: float = 0.0
    """Time to read the stage's weights: the minimum for computing a step's tokens."""
    token: float = 0.0
    context: float = 0.0
    """Per token that attention reads."""
    hop: float = 0.0
    hop_token: float = 0.0
    dispatch: float = 0.0
    """From the engine to the first stage."""
    blocking: bool = False
    """True: a stage cannot compute while it sends."""

    def stage(self, tokens: int, context: int) -> float:
        """Return one stage's time for a step."""
        return self.base + max(self.weights, self.token * tokens) + self.context * context

    def link(self, tokens: int) -> float:
        return self.hop + self.hop_token * tokens


def cards(hop: float, dispatch: float, bandwidth: float = 118e6) -> Costs:
    """Llama-2-13b in fp16 on four stages of one 12 GB card each, 504 GB/s and 40 TFLOPS, joined by 1 GbE.

    Args:
        hop, dispatch: latencies, seconds.
        bandwidth: of the links, bytes per second.
    """
    memory = 0.85 * 504e9
    return Costs(
        base=2e-3,
        weights=6.5e9 / memory,
        token=2 * 3.25e9 / 40e12,
        context=204_800 / memory,
        hop=hop,
        hop_token=20_480 / bandwidth,
        dispatch=dispatch,
    )


@dataclass(frozen=True)
class PipelineJob:
    """A request: `prompt` and `output` in tokens, `at` in seconds."""

    prompt: int
    output: int
    at: float = 0.0


@dataclass(frozen=True)
class Step:
    """Times of one microbatch on each stage."""

    step_id: int
    tokens: int
    decodes: int
    began: tuple[float, ...]
    """Per stage, seconds."""
    ended: tuple[float, ...]


@dataclass
class PipelineRun:
    """Result of one simulation. Times in seconds from the first arrival."""

    stages: int
    steps: list[Step] = field(default_factory=list)
    plans: list[SchedulerOutput] = field(default_factory=list)
    preemptions: int = 0
    tokens: dict[int, list[float]] = field(default_factory=dict)
    """Number of a request -> times at which its tokens were published."""
    arrived: dict[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """From the first arrival to the last token."""
        return max(times[-1] for times in self.tokens.values()) - min(self.arrived.values())

    @property
    def utilisation(self) -> list[float]:
        """Per stage: the share of `total` in which it computed."""
        return [sum(s.ended[i] - s.began[i] for s in self.steps) / self.total for i in range(self.stages)]

    @property
    def bubbles(self) -> list[float]:
        return [1 - share for share in self.utilisation]

    @property
    def ttft(self) -> Seconds:
        """Per request: from its arrival to its first token."""
        return np.array([times[0] - self.arrived[number] for number, times in self.tokens.items()])

    @property
    def itl(self) -> Seconds:
        """All gaps between two tokens of a request."""
        return np.concatenate([np.diff(times) for times in self.tokens.values()])

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(map(len, self.tokens.values())) / self.total


def spread(values: Seconds) -> dict[str, float]:
    """Mean, median and 99th percentile."""
    if not len(values):
        return {}
    middle, high = np.percentile(values, (50, 99))
    return {"mean": float(values.mean()), "p50": float(middle), "p99": float(high)}


@dataclass
class _Pipeline:
    """Times at which stages are free and sampled tokens have arrived at the first stage."""

    costs: Costs
    stages: int
    num_slots: int

    def __post_init__(self) -> None:
        self._free = [0.0] * self.stages
        self._link_free = [0.0] * (self.stages - 1)
        self._fed_back = np.zeros(self.num_slots)
        """Time at which the newest sampled token of the slot is on the first stage."""

    def run(self, plan: SchedulerOutput, now: float) -> Step:
        """Run the step through all stages."""
        costs, slots = self.costs, unpack(plan.slots)
        starts, counts = unpack(plan.starts), unpack(plan.counts)
        tokens, context = int(counts.sum()), int((starts + counts).sum())
        seconds, link = costs.stage(tokens, context), costs.link(tokens)
        self._fed_back[[request.slot for request in plan.new]] = 0.0
        ready = max(now + costs.dispatch, float(self._fed_back[slots].max()))
        began, ended = [], []
        for stage in range(self.stages):
            began.append(max(ready, self._free[stage]))
            ended.append(began[-1] + seconds)
            self._free[stage] = ended[-1]
            if stage + 1 < self.stages:
                ready = self._link_free[stage] = max(ended[-1], self._link_free[stage]) + link
                if costs.blocking:
                    self._free[stage] = ready
        sampled = slots[np.frombuffer(plan.samples, np.bool_)]
        self._fed_back[sampled] = ended[-1] + (costs.link(0) if self.stages > 1 else 0.0)
        return Step(plan.step_id, tokens, int((counts == 1).sum()), tuple(began), tuple(ended))


def simulate(
    policy: BatchingPolicy,
    limits: Limits,
    depth: int,
    costs: Costs,
    jobs: Sequence[PipelineJob],
    keep_plans: bool = False,
) -> PipelineRun:
    """Run all jobs to their end. Each prompt differs from all others from its first token on."""
    core = EngineCore(limits, policy, depth, VOCAB, max_num_queued_reqs=len(jobs) + 1, max_num_queued_tokens=1 << 40)
    pipeline = _Pipeline(costs, limits.stages, limits.num_slots)
    run = PipelineRun(limits.stages)
    due = deque(sorted(enumerate(jobs), key=lambda job: job[1].at))
    results: deque[tuple[float, ModelRunnerOutput]] = deque()
    while due or results or core.has_requests:
        now = min(results[0][0] if results else np.inf, due[0][1].at if due else np.inf)
        while due and due[0][1].at <= now:
            number, job = due.popleft()
            run.arrived[number], run.tokens[number] = job.at, []
            _add(core, number, job)
        while results and results[0][0] <= now:
            core.on_result(results.popleft()[1])
        _publish(core, run, now)
        for plan in plans(core):
            run.steps.append(pipeline.run(plan, now))
            results.append((run.steps[-1].ended[-1], result_of(plan)))
            if keep_plans:
                run.plans.append(plan)
    run.preemptions = core.store.counters["num_preemptions"]
    return run


def _add(core: EngineCore, number: int, job: PipelineJob) -> None:
    prompt = np.full(job.prompt, 1, np.int32)
    prompt[:2] = divmod(number + 2, VOCAB)[: job.prompt] if job.prompt > 1 else number % VOCAB
    core.add(0, generate(prompt, number, max_tokens=job.output))


def _publish(core: EngineCore, run: PipelineRun, now: float) -> None:
    for _, outputs in core.take_outputs():
        for number in unpack(outputs.numbers, np.uint32).tolist():
            run.tokens[number].append(now)
        for finish in outputs.finished:
            if finish.reason is not FinishReason.LENGTH:
                raise AssertionError(f"request {finish.number}: {finish.reason.name} {finish.message}")
