"""One step in the runner: computed and not sampled yet, then a result."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepTimes
from services.worker.backends.native.outcome import Outcome
from services.worker.backends.native.sampling.logprobs import PromptScores
from services.worker.backends.native.sampling.sampler import SampledTokens
from services.worker.backends.pooling import PooledRows
from services.worker.batch.slots import Rows


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
    times: StepTimes
    """Times up to the end of the forward pass."""

    @property
    def sampling(self) -> bool:
        return bool(self.rows.samples.any())

    @property
    def slots(self) -> NDArray[np.int32]:
        """int32[sampling rows]"""
        return self.rows.slots[self.rows.samples]

    @property
    def firsts(self) -> NDArray[np.int32]:
        """int32[sampling rows]: position of the first token that each row samples."""
        return (self.rows.ends - self.rows.drafts)[self.rows.samples]

    def empty_message(self) -> torch.Tensor:
        """Return a message for the outcome, of the same shape on all ranks."""
        most = 1 + int(self.rows.drafts.max())
        return Outcome.empty_message(len(self.slots), most, self.step.num_speculative_tokens)


@dataclass(frozen=True)
class NativeResult:
    """A step's result. On the CPU its ids are available at once, in memory that no later step changes (immutable
    result, docs/invariants.md)."""

    step: SchedulerOutput
    rows: Rows
    sampled: SampledTokens
    drafts: NDArray[np.int32]
    """int32[sampling rows, k]: drafts for the next step"""
    logprobs: LogprobRows | None
    pooled: PooledRows | None
    times: StepTimes

    def get(self) -> ModelRunnerOutput:
        samples = self.rows.samples
        embedding_slots, embeddings = self.pooled.to_message() if self.pooled is not None else (b"", b"")
        return ModelRunnerOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            slots=self.rows.slots[samples].tobytes(),
            generations=self.rows.generations[samples].tobytes(),
            counts=self.sampled.counts.tobytes(),
            token_ids=self.sampled.ids.numpy().tobytes(),
            times=self.times,
            logprobs=self.logprobs.to_message() if self.logprobs is not None else None,
            embedding_slots=embedding_slots,
            embeddings=embeddings,
            drafted=self.sampled.drafted.tobytes() if self.sampled.drafted.any() else b"",
            draft_token_ids=self.drafts.tobytes() if self.step.has_structured_output_requests else b"",
        )
