"""The table of features that can be combined. Combinations are refused only by it; `runahead capabilities` prints them.

A combination is (batching policy, more than one pipeline stage, more steps in flight than stages, backend, speculative
decoding, structured output). Whatever `refusal` does not name works, registered policies included: tests/integration/
scheduler runs these combinations, tests/vllm those of vLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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


POLICIES = tuple(BUILT_IN)
BACKENDS = ("native", "vllm", "sim", "sim rigid")


def refusal(combination: Combination) -> str | None:
    """Return why the combination is refused, or None."""
    if combination.batching_policy == "phased" and combination.speculation:
        return "speculation needs steps that mix prefill and decode: not --batching-policy phased"
    if combination.batching_policy in ("chunked", "balanced") and combination.backend == "sim rigid":
        return "a rigid device cannot mix prefill and decode: use --batching-policy phased"
    return None


def table() -> Iterator[tuple[Combination, str | None]]:
    """Iterate over every combination with a built-in policy, each with the reason if it is refused."""
    for cell in product(POLICIES, (False, True), (False, True), BACKENDS, (False, True), (False, True)):
        combination = Combination(*cell)
        yield combination, refusal(combination)
