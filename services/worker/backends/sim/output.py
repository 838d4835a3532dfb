"""What a step leaves on its way to the host."""

from dataclasses import dataclass

from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepTimes
from services.worker.backends.sim.acceptance import CopiedTokens
from services.worker.backends.sim.device import Event
from services.worker.backends.sim.extras import Copied
from services.worker.backends.sim.rigid import Shape
from services.worker.backends.sim.trace import StepTrace
from services.worker.batch.slots import I32, Rows


@dataclass(frozen=True)
class StepOutput:
    """An `Output`: the tokens are being copied. Everything it refers to is its own (S3-1, S3-8)."""

    step: SchedulerOutput
    rows: Rows
    sampled: CopiedTokens | None
    """None on a rank that does not report the step."""
    prepared: float
    """Seconds on the monotonic clock: the step was ready to be launched."""
    forward: Event
    done: Event
    trace: StepTrace | None
    shape: Shape | None = None
    """On a rigid device."""
    extras: Copied | None = None
    """Where a row asks for more than a token."""
    drafts: I32 | None = None
    """int32[sampled rows, num_speculative_tokens], where a grammar looks at them."""

    def get(self) -> ModelRunnerOutput | StepTimes:
        self.done.synchronize()
        step, rows = self.step, self.rows
        if self.trace is not None and step.step_id:  # 0: the canary
            tokens = int(rows.counts.sum())
            self.trace.write(step.epoch, step.step_id, self.forward.began, self.done.ended, tokens)
        times = StepTimes(
            prepared=self.prepared,
            forward_began=self.forward.began,
            forward_ended=self.forward.ended,
            sampled=self.done.ended,
        )
        if self.sampled is None:
            return times
        sampled, extras = self.sampled, self.extras
        logprobs = None if extras is None else extras.logprobs()
        result = ModelRunnerOutput(
            epoch=step.epoch,
            step_id=step.step_id,
            slots=sampled.slots.tobytes(),
            generations=sampled.generations.tobytes(),
            counts=sampled.counts.tobytes(),
            token_ids=sampled.ragged().tobytes(),
            times=times,
            logprobs=None if logprobs is None else logprobs.to_message(),
            embedding_slots=b"" if extras is None else extras.embedding_slots.tobytes(),
            embeddings=b"" if extras is None else extras.embeddings.tobytes(),
            drafted=sampled.drafted.tobytes() if step.drafts else b"",
            draft_token_ids=b"" if self.drafts is None else self.drafts.tobytes(),
        )
        return result if self.shape is None else self.shape.complete(result)
