"""The table of features that can be combined. `runahead capabilities` prints it; combinations are refused only by it.

A combination is (batching policy, more than one pipeline stage, more steps in flight than stages, backend, speculative
decoding, structured output). Whatever is not listed in `REFUSED` works: tests/integration/scheduler runs these
combinations, tests/vllm those of vLLM. A registered policy is subject to the rows that name no policy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Self

from services.config import SchedulerConfig
from services.scheduler.policies import BUILT_IN


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
    """With requests for structured output, which need the model's tokenizer too."""

    @classmethod
    def from_config(cls, config: SchedulerConfig, backend: str) -> Self:
        """Return the features that all requests of this scheduler share."""
        stages = config.pipeline_parallel_size
        speculation = config.speculative_config is not None
        return cls(config.policy, stages > 1, config.depth > stages, backend, speculation)

    def __str__(self) -> str:
        stages = "several stages" if self.pipeline else "one stage"
        depth = "runs ahead" if self.runs_ahead else "synchronous"
        drafts = ", drafts" if self.speculation else ""
        output = ", structured output" if self.structured else ""
        return f"{self.batching_policy} policy, {stages}, {depth}, {self.backend} backend{drafts}{output}"


@dataclass(frozen=True, slots=True)
class RefusedPattern:
    """Combinations that are refused. None matches any value."""

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


POLICIES = tuple(BUILT_IN)
BACKENDS = ("native", "vllm", "sim", "sim rigid")
_RIGID = "a rigid device cannot mix prefill and decode: use --batching-policy phased"
REFUSED: tuple[RefusedPattern, ...] = (
    RefusedPattern(
        "speculation needs steps that mix prefill and decode: not --batching-policy phased",
        batching_policy="phased",
        speculation=True,
    ),
    RefusedPattern(_RIGID, batching_policy="chunked", backend="sim rigid"),
    RefusedPattern(_RIGID, batching_policy="balanced", backend="sim rigid"),
)


def refusal(combination: Combination) -> str | None:
    """Return why the combination is refused, or None."""
    return next((row.reason for row in REFUSED if row.matches(combination)), None)


def table() -> Iterator[tuple[Combination, str | None]]:
    """Iterate over every combination with a built-in policy, each with the reason if it is refused."""
    for cell in product(POLICIES, (False, True), (False, True), BACKENDS, (False, True), (False, True)):
        combination = Combination(*cell)
        yield combination, refusal(combination)
