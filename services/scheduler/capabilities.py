"""What can be combined: one table, in data. It is printed, exported, and what it refuses is refused by name.

A cell is (batching policy, more than one pipeline stage, more than one step in flight beyond the stages, backend,
speculative decoding, a request with structured output among others). What is not listed in `REFUSED` works, and
tests/integration/scheduler/test_capabilities.py runs every such cell (tests/vllm those of vLLM).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Self

from services.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Combination:
    batching_policy: str
    pipeline: bool
    """More than one stage."""
    runs_ahead: bool
    """More steps in flight than stages."""
    backend: str
    speculation: bool = False
    """With drafts."""
    structured: bool = False
    """With requests for structured output, which need the model's tokenizer as well."""

    @classmethod
    def of(cls, config: SchedulerConfig, backend: str) -> Self:
        """What every request of this scheduler has in common."""
        stages = config.pipeline_parallel_size
        speculation = config.speculative_config is not None
        return cls(config.policy, stages > 1, config.depth > stages, backend, speculation)

    def __str__(self) -> str:
        stages, depth = "> 1" if self.pipeline else "1", "ahead" if self.runs_ahead else "synchronous"
        drafts, output = (
            ", drafts" if self.speculation else "",
            ", structured output" if self.structured else "",
        )
        return f"{self.batching_policy}, stages {stages}, {depth}, {self.backend}{drafts}{output}"


@dataclass(frozen=True, slots=True)
class Refused:
    """A pattern, None matching anything, and what to tell people."""

    reason: str
    batching_policy: str | None = None
    pipeline: bool | None = None
    runs_ahead: bool | None = None
    backend: str | None = None
    speculation: bool | None = None
    structured: bool | None = None

    def matches(self, combination: Combination) -> bool:
        pattern = ((getattr(self, f.name), getattr(combination, f.name)) for f in fields(combination))
        return all(wanted in (None, there) for wanted, there in pattern)


POLICIES = ("chunked", "balanced", "phased")
BACKENDS = ("native", "vllm", "sim", "sim rigid")
_RIGID = "a rigid device cannot mix prefill and decode: use --batching-policy phased"
REFUSED: tuple[Refused, ...] = (
    Refused(
        "speculation needs steps that mix prefill and decode: not --batching-policy phased",
        batching_policy="phased",
        speculation=True,
    ),
    Refused(_RIGID, batching_policy="chunked", backend="sim rigid"),
    Refused(_RIGID, batching_policy="balanced", backend="sim rigid"),
    Refused(
        "vLLM's stages learn sampled tokens from vLLM's own scheduler: use --pipeline-parallel-size 1",
        pipeline=True,
        backend="vllm",
    ),
)


def refusal(combination: Combination) -> str | None:
    """Why this cannot be served, or None if it can."""
    return next((row.reason for row in REFUSED if row.matches(combination)), None)


def table() -> Iterator[tuple[Combination, str | None]]:
    """Every cell, with the reason where it is refused."""
    for cell in product(POLICIES, (False, True), (False, True), BACKENDS, (False, True), (False, True)):
        combination = Combination(*cell)
        yield combination, refusal(combination)
