"""The result of a step on its way to the host."""

from dataclasses import dataclass

from protocol.rows import EmbeddingRows, LogprobRows
from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepTimes
from services.worker.backends.sim.device.rigid import PaddedStep
from services.worker.backends.sim.device.simulated import SimEvent
from services.worker.backends.sim.sampling.acceptance import CopiedTokens
from services.worker.batch.slots import I32, NONE


@dataclass(frozen=True)
class StepOutput:
    """An `Output` whose tokens are being copied. No later step changes anything that it refers to (immutable result;
    docs/invariants.md)."""

    is_done = False
    step: SchedulerOutput
    prepared: float
    """Seconds on the monotonic clock: the step was ready to be launched."""
    forward: SimEvent
    copied: SimEvent
    """The last copy to the host."""
    padded: PaddedStep | None = None
    """On a rigid device."""
    sampled: CopiedTokens | None = None
    """None on a rank that does not report the step."""
    logprobs: LogprobRows | None = None
    """Position NONE: no token was sampled there."""
    embeddings: EmbeddingRows | None = None
    exchanged: SimEvent | None = None
    """The comparison with other ranks, on the last stage."""
    drafts: I32 | None = None
    """int32[sampled rows, num_speculative_tokens], if the step has a grammar."""

    def get(self) -> ModelRunnerOutput | StepTimes:
        if self.exchanged is not None:
            self.exchanged.reach()
        self.copied.synchronize()
        times = StepTimes(
            prepared=self.prepared,
            forward_began=self.forward.began,
            forward_ended=self.forward.ended,
            sampled=self.copied.ended,
        )
        if self.sampled is None:
            return times
        result = self._result(self.sampled, times)
        return result if self.padded is None else self.padded.complete(result)

    def _result(self, sampled: CopiedTokens, times: StepTimes) -> ModelRunnerOutput:
        step, embeddings, logprobs = self.step, self.embeddings, self.logprobs
        if logprobs is not None:
            exist = logprobs.positions != NONE
            logprobs = logprobs.select(exist) if exist.any() else None
        return ModelRunnerOutput(
            epoch=step.epoch,
            step_id=step.step_id,
            slots=sampled.slots.tobytes(),
            generations=sampled.generations.tobytes(),
            counts=sampled.counts.tobytes(),
            token_ids=sampled.ragged().tobytes(),
            times=times,
            logprobs=None if logprobs is None else logprobs.to_message(),
            embedding_slots=b"" if embeddings is None else embeddings.slots.tobytes(),
            embeddings=b"" if embeddings is None else embeddings.values.tobytes(),
            drafted=sampled.drafted.tobytes() if step.drafts else b"",
            draft_token_ids=b"" if self.drafts is None else self.drafts.tobytes(),
        )
