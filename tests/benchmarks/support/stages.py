"""A pipeline of stages under a workload, with a scheduler and workers as processes.

Times of simulated stages are those of the simulated device (`--sim-trace`), times of native ones come from step
records.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.records import StepRecord
from tests.benchmarks.support.engine_client import BenchmarkClient, engine

Prompts = Sequence[NDArray[np.int32] | Sequence[int]]
"""Token ids of each request."""


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
        return {
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "tokens_per_microbatch": self.microbatches,
            "bubbles": [round(share, 4) for share in self.bubbles],
            "preemptions": self.preemptions,
        }


def run_stages(
    num_stages: int, prompts: Prompts, output: int, scheduler: Mapping[str, object], worker: Mapping[str, object]
) -> StagesRun:
    """Run all requests at once on a scheduler and `num_stages` simulated workers.

    Args:
        output: tokens of each answer.
        scheduler: settings by field name: policy, depth and budgets.
        worker: settings by field name: the cost model.

    Raises: RuntimeError, if a request fails; TimeoutError, if the engine sends no messages.
    """
    with tempfile.TemporaryDirectory(prefix="runahead-") as directory:
        trace = Path(directory) / "trace"
        group = {"pipeline_parallel_size": num_stages, **scheduler}
        stages = {"backend": "sim", "sim_vocab_size": 32_000, "sim_trace": trace, **worker}
        with engine(group, stages, num_stages) as client:
            seconds, preemptions = _serve(client, prompts, output)
            _until_written(trace, num_stages)
        return StagesRun(seconds, read_trace(trace), client.tokens, preemptions)


def run_native_stages(
    num_stages: int, prompts: Prompts, output: int, scheduler: Mapping[str, object], worker: Mapping[str, object]
) -> StagesRun:
    """As `run_stages`, on the native backend. A span lasts from the beginning to the end of the forward pass."""
    group = {"pipeline_parallel_size": num_stages, **scheduler}
    with engine(group, {"backend": "native", **worker}, num_stages) as client:
        client.subscribe()
        seconds, preemptions = _serve(client, prompts, output)
        while sum(int(unpack(record.generated).sum()) for record in client.records) < client.tokens:
            client.receive()
        spans = spans_of(client.records)
    return StagesRun(seconds, spans, client.tokens, preemptions)


def _serve(client: BenchmarkClient, prompts: Prompts, output: int) -> tuple[float, int]:
    """Send all requests at once. Return the seconds until the last one has ended, and the number of preemptions."""
    began = time.monotonic()
    for number, prompt in enumerate(prompts):
        client.generate(prompt, number, output)
    while client.finished < len(prompts):
        client.receive()
    seconds = time.monotonic() - began
    for finish in client.finishes:
        if finish.message:
            raise RuntimeError(f"request {finish.number}: {finish.message}")
    return seconds, sum(finish.num_preemptions for finish in client.finishes)


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
