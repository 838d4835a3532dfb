"""The result of a step on its way to the host."""

from dataclasses import dataclass

from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepTimes
from services.worker.backends.pooling import PooledRows
from services.worker.backends.sim.device.rigid import PaddedStep
from services.worker.backends.sim.device.simulated import SimEvent
from services.worker.backends.sim.output.logprobs import StepLogprobs
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.batch.slots import I32


@dataclass(frozen=True)
class StepOutput:
    """An `Output`, in memory of its step alone: no later step changes anything that it refers to (immutable result;
    docs/invariants.md)."""

    is_done = False
    step: SchedulerOutput
    prepared: float
    """Seconds on the monotonic clock: the step was ready to be launched."""
    forward: SimEvent
    ended: SimEvent
    """The end of the last work that the result waits for."""
    acceptance: DraftAcceptance
    padded: PaddedStep | None
    """On a rigid device."""
    logprobs: StepLogprobs | None
    """On the output rank, if a row requests them; likewise `pooled`."""
    pooled: PooledRows | None
    exchanged: SimEvent | None = None
    """The comparison with other ranks, on the last stage."""
    drafts: I32 | None = None
    """int32[sampled rows, num_speculative_tokens], if the step has a grammar."""
    is_reported: bool = False
    """True on the output rank."""

    def get(self) -> ModelRunnerOutput | StepTimes:
        if self.exchanged is not None:
            self.exchanged.reach()
        self.ended.synchronize()
        times = StepTimes(
            prepared=self.prepared,
            forward_began=self.forward.began,
            forward_ended=self.forward.ended,
            sampled=self.ended.ended,
        )
        if not self.is_reported:
            return times
        result = self._result(times)
        return result if self.padded is None else self.padded.complete(result)

    def _result(self, times: StepTimes) -> ModelRunnerOutput:
        step, sampled, embedding_slots, embeddings = self.step, self.acceptance, b"", b""
        logprobs = None if self.logprobs is None else self.logprobs.result
        if self.pooled is not None:
            embedding_slots, embeddings = self.pooled.to_message(self.pooled.embeddings.astype("float32"))
        return ModelRunnerOutput(
            epoch=step.epoch,
            step_id=step.step_id,
            slots=sampled.slots.tobytes(),
            generations=sampled.generations.tobytes(),
            counts=sampled.counts.tobytes(),
            token_ids=sampled.token_ids.tobytes(),
            times=times,
            logprobs=None if logprobs is None else logprobs.to_message(),
            embedding_slots=embedding_slots,
            embeddings=embeddings,
            drafted=sampled.drafted.tobytes() if step.drafts else b"",
            draft_token_ids=b"" if self.drafts is None else self.drafts.tobytes(),
        )
