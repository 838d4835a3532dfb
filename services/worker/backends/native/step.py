"""One step in the runner: prepared, computed and not sampled yet, then a result."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import has_any
from protocol.rows import LogprobRows, StepRows
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.worker.backends.native.sampling.logprobs import PromptScores, download_scores
from services.worker.backends.native.sampling.sampler import SampledTokens
from services.worker.backends.pooling import PooledRows
from services.worker.batch.slots import Rows
from services.worker.device.device_times import DeviceTime, StepClock
from services.worker.device.interface import ComputeDevice, HostCopy
from services.worker.distributed.outcome import Outcome


class PreparedStep(NamedTuple):
    """A checked step that the compute thread has not begun. Every array is read-only and nobody's but the step's."""

    step: SchedulerOutput
    plan: StepRows
    released: list[NDArray[np.int32]]
    """Slots that were released before this step, without a step."""
    prepared: float
    """When it was prepared: seconds on the monotonic clock."""


@dataclass(frozen=True)
class ComputedStep:
    """A step between its forward pass and its sampling."""

    step: SchedulerOutput
    rows: Rows
    """Rows at their true positions."""
    logits: torch.Tensor | None
    """float32[sampled tokens, vocab], valid until the next step. None if another rank samples."""
    pooled: PooledRows | None
    prompts: PromptScores | None
    """Log-probabilities of prompt tokens; None if no row requests them."""
    clock: StepClock

    @cached_property
    def sampling(self) -> bool:
        return has_any(self.rows.samples)

    @cached_property
    def slots(self) -> NDArray[np.int32]:
        """int32[sampling rows]"""
        return self.rows.slots[self.rows.samples]

    @cached_property
    def firsts(self) -> NDArray[np.int32]:
        """int32[sampling rows]: position of the first token that each row samples."""
        return self.rows.firsts[self.rows.samples]

    def empty_message(self) -> torch.Tensor:
        return Outcome.empty_message(self.rows, self.step.num_speculative_tokens)


@dataclass(frozen=True)
class NativeResult:
    """A step's result on its way to the host, in memory that no later step changes (immutable result,
    docs/invariants.md)."""

    step: SchedulerOutput
    rows: Rows
    sampled: SampledTokens
    drafts: NDArray[np.int32]
    """int32[sampling rows, k]: drafts for the next step"""
    ids: HostCopy
    """int32[sum(counts)]: the sampled ids; float32[completed, hidden]: embeddings, if a row is pooled"""
    logprobs: Callable[[], LogprobRows | None]
    pooled: PooledRows | None
    clock: StepClock
    ended: DeviceTime

    @classmethod
    def begin(
        cls, computed: ComputedStep, sampled: SampledTokens, drafts: NDArray[np.int32], device: ComputeDevice
    ) -> Self:
        """Begin the copies of everything that the result reports."""
        pooled, scored = computed.pooled, [*computed.prompts.parts] if computed.prompts is not None else []
        scored += [sampled.logprobs] if sampled.logprobs is not None else []
        return cls(
            *(computed.step, computed.rows, sampled, drafts),
            device.download(sampled.ids, *([pooled.embeddings] if pooled is not None else [])),
            download_scores(scored, device),
            *(pooled, computed.clock, device.now()),
        )

    def get(self) -> ModelRunnerOutput:
        """Wait for the copies, and return the result."""
        samples, logprobs = self.rows.samples, self.logprobs()
        token_ids, *embedded = self.ids()
        embedding_slots, embeddings = b"", b""
        if self.pooled is not None:
            embedding_slots, embeddings = self.pooled.to_message(*embedded)
        return ModelRunnerOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            slots=self.rows.slots[samples].tobytes(),
            generations=self.rows.generations[samples].tobytes(),
            counts=self.sampled.counts.tobytes(),
            token_ids=token_ids.tobytes(),
            times=self.clock.times(self.ended),
            logprobs=logprobs.to_message() if logprobs is not None else None,
            embedding_slots=embedding_slots,
            embeddings=embeddings,
            drafted=self.sampled.drafted.tobytes() if has_any(self.sampled.drafted) else b"",
            draft_token_ids=self.drafts.tobytes() if self.step.has_structured_output_requests else b"",
        )
