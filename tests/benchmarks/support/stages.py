"""A pipeline of stages under a workload, with a scheduler and workers as processes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        """Number of tokens of each step, in order, on the stage whose report comes with the result."""
        return [span.tokens for span in self.spans if span.stage == self.spans[-1].stage]

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
    """Run all requests at once on a scheduler and `num_stages` workers. A span lasts from the beginning to the end of
    the forward pass.

    Args:
        output: tokens of each answer.
        scheduler: settings by field name: policy, depth and budgets.
        worker: settings by field name: the backend, and its cost model or its model.

    Raises: RuntimeError, if a request fails; TimeoutError, if the engine sends no messages.
    """
    with engine({"pipeline_parallel_size": num_stages, **scheduler}, worker, num_stages) as client:
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
