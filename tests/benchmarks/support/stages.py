"""A pipeline of stages under a workload, with a scheduler and workers as processes.

Times of simulated stages are those of the simulated device (`--sim-trace`), times of native ones come from step
records. Latencies are measured at the client.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.records import StepRecord
from tests.benchmarks.support.engine_client import BenchmarkClient, engine

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class TimedRequest:
    """A request. `prompt` is token ids; `at` is its time after the first request, seconds."""

    prompt: NDArray[np.int32] | Sequence[int]
    max_tokens: int
    at: float = 0.0


@dataclass(frozen=True)
class Span:
    """One step on one stage."""

    step_id: int
    stage: int
    began: float
    """Seconds since the first step began."""
    ended: float
    tokens: int


@dataclass(frozen=True)
class StagesRun:
    seconds: float
    """Seconds from the first request to the last token, at the client."""
    spans: tuple[Span, ...]
    """Ordered by stage, then by step."""
    tokens: int
    preemptions: int
    ttft: NDArray[np.float64]
    """Time to first token of each request, seconds."""
    itl: NDArray[np.float64]
    """Times between consecutive tokens of all requests, seconds."""

    @property
    def makespan(self) -> float:
        """Seconds from the begin of the first step to the end of the last one, over all stages."""
        return max(span.ended for span in self.spans)

    @property
    def bubbles(self) -> list[float]:
        """Share of `makespan` in which each stage is idle, including the filling and draining of the pipeline."""
        busy: dict[int, float] = {}
        for span in self.spans:
            busy[span.stage] = busy.get(span.stage, 0.0) + span.ended - span.began
        return [1 - seconds / self.makespan for _, seconds in sorted(busy.items())]

    @property
    def microbatches(self) -> list[int]:
        """Number of tokens of each step, in order."""
        return [span.tokens for span in self.spans if span.stage == 0]

    def figures(self) -> dict[str, object]:
        """Return the metrics of the run; times in seconds."""
        sizes = self.microbatches
        return {
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "steps": len(sizes),
            "tokens_per_microbatch": {"mean": float(np.mean(sizes)), **percentiles(sizes)},
            "bubbles": [round(share, 4) for share in self.bubbles],
            "preemptions": self.preemptions,
            "ttft": percentiles(self.ttft),
            "itl": percentiles(self.itl),
        }


def percentiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def run_stages(
    num_stages: int,
    requests: Sequence[TimedRequest],
    scheduler: Mapping[str, object] | None = None,
    worker: Mapping[str, object] | None = None,
) -> StagesRun:
    """Run `requests` on a scheduler and `num_stages` simulated workers.

    Args:
        scheduler: settings by field name: policy, depth and budgets.
        worker: settings by field name: the cost model.

    Raises: RuntimeError, if a request fails; TimeoutError, if the engine sends no messages.
    """
    with tempfile.TemporaryDirectory(prefix="runahead-") as directory:
        trace = Path(directory) / "trace"
        group = {"pipeline_parallel_size": num_stages, **(scheduler or {})}
        stages = {"backend": "sim", "sim_vocab_size": 32_000, "sim_trace": trace, **(worker or {})}
        with engine(group, stages, num_stages) as client:
            load = _LoadRun(client, requests)
            seconds = load.run()
            _until_written(trace, num_stages)
        return StagesRun(
            seconds, read_trace(trace), client.tokens, load.preemptions,
            np.array(load.first), np.array(load.gaps),
        )  # fmt: skip


def run_native_stages(
    num_stages: int, requests: Sequence[TimedRequest], scheduler: Mapping[str, object], worker: Mapping[str, object]
) -> StagesRun:
    """As `run_stages`, on the native backend. A span lasts from the beginning to the end of the forward pass."""
    group = {"pipeline_parallel_size": num_stages, **scheduler}
    with engine(group, {"backend": "native", **worker}, num_stages) as client:
        client.subscribe()
        load = _LoadRun(client, requests)
        seconds = load.run()
        while sum(int(unpack(record.generated).sum()) for record in client.records) < client.tokens:
            client.receive()
        spans = spans_of(client.records)
    return StagesRun(seconds, spans, client.tokens, load.preemptions, np.array(load.first), np.array(load.gaps))


def spans_of(records: Sequence[StepRecord]) -> tuple[Span, ...]:
    """Return the forward passes of recorded steps, ordered by stage, then by step. Each rank is a stage."""
    spans = [
        Span(
            record.step_id, each.rank, each.times.forward_began, each.times.forward_ended,
            int(unpack(record.scheduled).sum()),
        )
        for record in records
        for each in record.ranks
    ]  # fmt: skip
    zero = min(span.began for span in spans)
    moved = [replace(span, began=span.began - zero, ended=span.ended - zero) for span in spans]
    return tuple(sorted(moved, key=lambda span: (span.stage, span.step_id)))


def _until_written(trace: Path, num_stages: int) -> None:
    """Wait until every stage has written a line for every step. Each stage is a process of its own."""
    for _ in range(100):
        steps = [span.stage for span in read_trace(trace)]
        if len({steps.count(stage) for stage in range(num_stages)}) == 1:
            return
        time.sleep(0.05)
    raise RuntimeError("not every stage has written a line for every step")


def read_trace(trace: Path) -> tuple[Span, ...]:
    """Read the steps of one epoch from `--sim-trace`, ordered by stage, then by step."""
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    if len({line["epoch"] for line in lines}) > 1:
        raise RuntimeError("a worker was lost: the steps belong to several epochs")
    zero = min(line["began"] for line in lines)
    spans = [
        Span(line["step_id"], line["stage"], line["began"] - zero, line["ended"] - zero, line["tokens"])
        for line in lines
    ]
    return tuple(sorted(spans, key=lambda span: (span.stage, span.step_id)))


@dataclass
class _LoadRun:
    """Sends the requests at their times and records the arrival of tokens."""

    client: BenchmarkClient
    requests: Sequence[TimedRequest]
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    preemptions: int = 0

    def run(self) -> float:
        """Send all requests. Return the seconds until the last one has ended."""
        due = sorted(range(len(self.requests)), key=lambda number: self.requests[number].at, reverse=True)
        last = dict.fromkeys(range(len(self.requests)), 0.0)
        began = now = time.monotonic()
        open_ = set(last)
        started: set[int] = set()
        while open_:
            now = time.monotonic()
            while due and began + self.requests[due[-1]].at <= now:
                number = due.pop()
                self.client.generate(self.requests[number].prompt, number, self.requests[number].max_tokens)
                last[number] = now
            wait = max(0.0, began + self.requests[due[-1]].at - time.monotonic()) if due else None
            outputs = self.client.receive(wait)
            if outputs is None:
                continue
            now = time.monotonic()
            for number in np.frombuffer(outputs.numbers, np.uint32).tolist():
                (self.gaps if number in started else self.first).append(now - last[number])
                started.add(number)
                last[number] = now
            for finish in outputs.finished:
                if finish.message:
                    raise RuntimeError(f"request {finish.number}: {finish.message}")
                self.preemptions += finish.num_preemptions
                open_.remove(finish.number)
        return now - began
