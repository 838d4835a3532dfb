"""State of a native runner that ends with the epoch: batch, cache, sampler, drafts; and the steps that use it.

The first stage needs the sampled ids as input of later steps, and the drafts for the next step, which only the output
rank proposes. Without pipeline stages, the output rank broadcasts both in its tensor-parallel group. With stages, the
last stage sends them to the first one (feedback.py), whose first rank broadcasts them. With drafts, a rank without the
sampled tokens cannot compute the true positions of rows, so each stage sends them to the next one with every step.
"""

import time

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache
from protocol.rows import LogprobRows
from protocol.steps import NO_DRAFT, GrammarOutput, SchedulerOutput, StepTimes
from services.worker.backends.native.draft_table import DraftTable, positions_message, rows_from_message
from services.worker.backends.native.drafters.base import Advance, Drafter, DrafterSlots
from services.worker.backends.native.feedback import TokenFeedback
from services.worker.backends.native.model.forward import ForwardPass
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.outcome import Outcome
from services.worker.backends.native.sampling.acceptance import SamplePositions
from services.worker.backends.native.sampling.logprobs import PromptScores
from services.worker.backends.native.sampling.sampler import SampledTokens, Sampler
from services.worker.backends.native.step import ComputedStep, NativeResult
from services.worker.backends.native.token_history import TokenHistory
from services.worker.backends.pending_step import PendingStep, own_grammar
from services.worker.backends.pooling import Pooler
from services.worker.batch.slots import PlanError, Rows, SlotTable
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT
from services.worker.distributed.ranks import Ranks
from services.worker.runner import ForwardDone, Output

_NO_DRAFTS = np.empty((0, 0), np.int32)


class NativeEpoch:
    """Created by `init_kv_cache` and dropped by `leave`. For one calling thread.

    Args:
        drafter: None on other ranks than the output rank, and without speculation
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        drafter: Drafter | None,
        assignment: Assignment,
        init: InitializeCache,
    ) -> None:
        slots, block_size = assignment.num_slots, assignment.block_size
        vocab_size, speculation = model.part.whole.vocab_size, assignment.speculation
        most = speculation.num_speculative_tokens if speculation is not None else 0
        self._kernels, self._ranks = model.kernels, ranks
        self.table = SlotTable(slots, block_size, init.num_blocks, init.max_model_len)
        self.history = TokenHistory(slots, init.max_model_len, vocab_size)
        self.drafts = DraftTable(slots, most, vocab_size, model.kernels.rows)
        """Used by the stages that embed tokens and that sample them."""
        self._feedback = TokenFeedback(slots, most=max(MAX_STEPS_IN_FLIGHT, 2 * ranks.pipeline.size))
        self._sampler = Sampler(self.table, self.history, vocab_size, model.kernels)
        self._pooler = Pooler(slots, model.part.whole.hidden_size)
        self._reads = drafter.reads if drafter is not None else ()
        self.proposer = (
            drafter.start(DrafterSlots(self.table, self.history, init.num_blocks))
            if drafter is not None
            else None
        )
        self._forward = ForwardPass(
            model, ranks, init.num_blocks, block_size, self.table.block_table, self._reads
        )
        self._pending = PendingStep[ComputedStep]()
        self.logits: torch.Tensor | None = None
        """float32[sampled tokens, vocab] of the step executed last, before sampling; None if another rank samples."""

    # -- the forward pass ----------------------------------------------------------------------------------------

    def execute(self, step: SchedulerOutput) -> None:
        """Run the forward pass; see `ModelRunner.execute_model`."""
        self._pending.require_none()
        ranks, pipeline = self._ranks, self._ranks.pipeline
        planned = self.table.apply(step)
        self._assign(step)
        rows = self._settled(planned)
        pooled = self._pooler.rows(step, rows, self.table) if ranks.is_output else None
        prompts = self._prompt_scores(rows) if pipeline.is_last else None
        self._forward.lay_out(rows, self.history if pipeline.is_first else None)
        prepared = time.monotonic()
        self.logits = self._forward.run(pooled, prompts)
        times = StepTimes(prepared=prepared, forward_began=prepared, forward_ended=time.monotonic())
        computed = ComputedStep(step, rows, self.logits, pooled, prompts, times)
        self._pending.put(computed)
        if pipeline.is_first and pipeline.size > 1 and computed.sampling:
            drafts = step.num_speculative_tokens
            self._feedback.expect(computed.slots, computed.firsts, drafts, computed.empty_message())

    def _assign(self, step: SchedulerOutput) -> None:
        """Assign slots to new requests. Only the stages that embed and that sample tokens store them."""
        is_first, is_output = self._ranks.pipeline.is_first, self._ranks.is_output
        for request in step.new if is_first or is_output else ():
            self.history.assign(request)
            self.drafts.assign(request.slot)
            if is_first:
                self._feedback.assign(request.slot)
            if is_output:
                self._sampler.assign(request.slot)
            if self.proposer is not None:
                self.proposer.assign(request.slot)

    def _prompt_scores(self, rows: Rows) -> PromptScores | None:
        return PromptScores.from_rows(rows, self.table, self._kernels.sampling, self.history)

    def _settled(self, planned: Rows) -> Rows:
        """Return the plan's rows at their true positions. The first and the last stage have the sampled tokens and
        compute the positions; every stage sends them to the next one.

        Raises: PlanError, also if the last stage's own positions differ from those it received.
        """
        pipeline = self._ranks.pipeline
        if pipeline.is_first and pipeline.size > 1:
            self._take_feedback(planned)
        rows = planned
        if pipeline.is_first or self._ranks.is_output:
            rows = self.drafts.settle(planned, self.history)
        if pipeline.size == 1 or not self.drafts.speculates:
            return rows
        if not pipeline.is_first:
            own, message = rows, torch.empty(2, len(planned.slots), dtype=torch.int32)
            rows = rows_from_message(planned, pipeline.receive_rows(message))
            if self._ranks.is_output and not torch.equal(positions_message(own), positions_message(rows)):
                raise PlanError(f"the stage before has other positions for slots {own.slots.tolist()}")
        if not pipeline.is_last:
            pipeline.send_rows(positions_message(rows))
        return rows

    def _take_feedback(self, rows: Rows) -> None:
        """Wait for the outcomes of the latest steps that sampled these rows, and store them."""
        for message in self._feedback.due(rows.slots):
            if self._ranks.tensor_parallel.is_first:
                self._ranks.pipeline.receive_feedback(message.body)
            outcome = Outcome.from_message(
                self._ranks.tensor_parallel.broadcast(message.body), message.drafts
            )
            stays = self._feedback.wanted(message)
            self._keep(message.slots[stays], message.firsts[stays], outcome.select(stays))

    # -- sampling ------------------------------------------------------------------------------------------------

    def sample(self, grammar: GrammarOutput | None) -> Output:
        """Sample the step that is pending; see `ModelRunner.sample_tokens`."""
        pending, ranks = self._pending.take(), self._ranks
        if not ranks.is_output:
            if ranks.pipeline.size == 1 and pending.sampling:
                message = ranks.tensor_parallel.broadcast(pending.empty_message())
                outcome = Outcome.from_message(message, pending.step.num_speculative_tokens)
                self._keep(pending.slots, pending.firsts, outcome)
            return ForwardDone(replace(pending.times, sampled=time.monotonic()))
        sampled = self._sampled(pending, grammar)
        if pending.sampling:
            self._keep(pending.slots, pending.firsts, Outcome(sampled.ids, sampled.counts, _NO_DRAFTS))
        drafts = self._proposed(pending, sampled)
        if pending.sampling and ranks.assignment.world_size > 1:
            message = Outcome(sampled.ids, sampled.counts, drafts).to_message(pending.empty_message())
            if ranks.pipeline.size > 1:
                ranks.pipeline.send_feedback(message)
            else:
                ranks.tensor_parallel.broadcast(message)
        scored = [pending.prompts.logprobs] if pending.prompts is not None else []
        scored += [sampled.logprobs] if sampled.logprobs is not None else []
        logprobs = LogprobRows.concatenate(scored) if scored else None
        times = replace(pending.times, sampled=time.monotonic())
        return NativeResult(pending.step, pending.rows, sampled, drafts, logprobs, pending.pooled, times)

    def _sampled(self, pending: ComputedStep, grammar: GrammarOutput | None) -> SampledTokens:
        rows, grammar = pending.rows, own_grammar(pending.step, grammar)
        assert pending.logits is not None, "the output rank has the logits"
        drafts = rows.drafts[rows.samples]
        return self._sampler.sample(pending.logits, pending.slots, pending.firsts, grammar, drafts)

    def _keep(self, slots: NDArray[np.int32], firsts: NDArray[np.int32], outcome: Outcome) -> None:
        """Store the outcome of rows whose first tokens have positions `firsts`: tokens in the history, drafts for the
        next row of the slot."""
        rows = SamplePositions.from_rows(self._kernels.rows, slots, firsts, outcome.counts - np.int32(1))
        self.history.append(rows.slots, rows.positions, outcome.ids)
        self.drafts.advance(slots, firsts, outcome.counts)
        self.drafts.propose(slots, outcome.drafts)

    def _proposed(self, pending: ComputedStep, sampled: SampledTokens) -> NDArray[np.int32]:
        """Return the drafts for the next step, int32[sampling rows, k], and advance the drafter's own state."""
        k = pending.step.num_speculative_tokens
        if self.proposer is None:
            return np.full((len(sampled.counts), k), NO_DRAFT, np.int32)
        rows, stay = pending.rows, pending.rows.counts
        if rows.drafts.any():
            stay = stay.copy()
            stay[rows.samples] += sampled.counts - 1 - rows.drafts[rows.samples]
        states, least = self._states(rows.counts, stay), pending.step.min_acceptance
        columns = rows.slots, rows.generations, rows.starts, stay, rows.samples
        drafts = self.proposer.propose(Advance(*columns, states, least), k)
        self.drafts.propose(pending.slots, drafts)
        return drafts

    def _states(self, counts: NDArray[np.int32], stay: NDArray[np.int32]) -> list[torch.Tensor]:
        """Return the hidden states that the drafter reads, [tokens, hidden] each, of the first `stay` of each row's
        `counts` positions."""
        states = self._forward.tapped()
        if not states or stay is counts or (stay == counts).all():
            return states
        owners, offsets = self._kernels.rows.spread(counts)
        tokens = torch.from_numpy(np.flatnonzero(offsets < stay[owners]))
        return [each[tokens] for each in states]

    def release(self, slots: NDArray[np.int32]) -> None:
        """Free slots whose requests have left."""
        self.table.release(slots)
