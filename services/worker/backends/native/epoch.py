"""State of the compute thread that ends with the epoch: batch, cache, sampler, drafts; and the steps that use it.

The first stage needs the sampled ids as input of later steps, and the drafts for the next step, which only the output
rank proposes. Without pipeline stages, the output rank broadcasts both in its tensor-parallel group. With stages, the
last stage sends them to the first one (feedback.py), whose first rank broadcasts them. With drafts, or rows that may be
left out, a rank without the sampled tokens cannot compute the true positions of rows, so each stage sends them to the
next one with the step.
"""

import time
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.columns import has_all, has_any
from protocol.kv_groups import ONE_GROUP
from protocol.membership import Assignment, InitializeCache
from protocol.steps import NO_DRAFT, SchedulerOutput
from services.worker.backends.kv_blocks import context_limit
from services.worker.backends.mask_inbox import ENDLESS, Forward, MaskInbox, joined
from services.worker.backends.native.draft_table import DraftTable, positions_message, rows_from_message
from services.worker.backends.native.drafters.base import Advance, Drafter, DrafterSlots
from services.worker.backends.native.model.forward import FEW, ForwardPass, most_rows
from services.worker.backends.native.model.layer_groups import LayerGroups
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.sampling.acceptance import SamplePositions
from services.worker.backends.native.sampling.logprobs import PromptScores
from services.worker.backends.native.sampling.sampler import SampledTokens, Sampler
from services.worker.backends.native.step import ComputedStep, NativeResult, PreparedStep
from services.worker.backends.native.token_history import TokenHistory
from services.worker.backends.pooling import Pooler
from services.worker.batch.slots import BatchColumns, PlanError, Rows, spread
from services.worker.device.device_times import StepClock
from services.worker.distributed.feedback import TokenFeedback
from services.worker.distributed.outcome import Outcome
from services.worker.distributed.ranks import Ranks
from services.worker.kernels.interface.kv_cache import Allocate, own_memory
from services.worker.kernels.interface.recording import Captured
from services.worker.runner import ForwardDone

_NO_DRAFTS = np.empty((0, 0), np.int32)


class NativeEpoch:
    """Created by `init_kv_cache` and dropped by `leave`. For one calling thread (stages.py).

    Args:
        drafter: None on other ranks than the output rank, and without speculation
        num_blocks: blocks of the cache, at least those that the scheduler uses
        allocate: memory of the caches
        groups: the model's groups of KV cache; None: one
    """

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        drafter: Drafter | None,
        assignment: Assignment,
        init: InitializeCache,
        num_blocks: int,
        allocate: Allocate = own_memory,
        groups: LayerGroups | None = None,
    ) -> None:
        slots, block_size = assignment.num_slots, assignment.block_size
        vocab_size, speculation = model.part.whole.vocab_size, assignment.speculation
        most_drafts = speculation.num_speculative_tokens if speculation is not None else 0
        self._kernels, self._ranks = model.kernels, ranks
        self.device = device = model.kernels.device
        self.columns = BatchColumns(
            slots, block_size, init.max_model_len, ONE_GROUP if groups is None else groups.groups
        )
        self.history = TokenHistory(slots, init.max_model_len, vocab_size, model.kernels)
        self.drafts = DraftTable(slots, most_drafts, vocab_size, model.kernels.rows)
        """Used by the stages that embed tokens and that sample them."""
        self._feedback = TokenFeedback(slots, ranks.pipeline.size)
        self._sampler = Sampler(self.columns, self.history, vocab_size, model.kernels)
        zeros = partial(torch.zeros, device=device.where)
        self._pooler = Pooler(slots, model.part.whole.hidden_size, zeros, in_order=device.is_host)
        self._reads = drafter.reads if drafter is not None else ()
        self.proposer = (
            drafter.start(DrafterSlots(self.columns, self.history, num_blocks, allocate))
            if drafter is not None
            else None
        )
        self._blocks = device.mirror(self.columns.block_table)
        """The block table, of which the device has a copy."""
        # Graphs of a device have the addresses of its buffers; those of the host grow
        capacity = FEW if device.is_host else most_rows(assignment, model.kernels.rows.tile)
        # Not the context that the scheduler serves, which follows from free memory: kept blocks may be of another one
        context = context_limit(assignment.max_model_len, model.part.whole.max_position)
        self.forward = ForwardPass(
            *(model, ranks, num_blocks, block_size, context, self._blocks.tensor, self._reads),
            *(capacity, allocate, groups),
        )
        self._ended = 0.0
        """When the last step was sampled: seconds on the monotonic clock; 0.0 before the first one."""
        self.logits: torch.Tensor | None = None
        """float32[sampled tokens, vocab] of the step executed last, before sampling; None if another rank samples."""

    def capture(self, progress: Captured) -> int:
        """Prepare sampling, and the sizes of steps that are replayed.

        Returns: bytes of device memory that the latter take.
        """
        if not self.device.is_host and self._ranks.is_output:
            self._sampler.prepare()
        return self.forward.recording.capture(progress)

    # -- the forward pass ----------------------------------------------------------------------------------------

    def execute(self, prepared: PreparedStep) -> ComputedStep:
        """Run the forward pass."""
        waited = time.monotonic() - self._ended if self._ended else 0.0
        ranks, pipeline, step = self._ranks, self._ranks.pipeline, prepared.step
        for slots in prepared.released:
            self.columns.release(slots)
        self.columns.apply_changes(prepared.plan, step.new)
        self._blocks.update([request.slot for request in step.new], prepared.plan.block_slots)
        self._assign(step)
        rows = self._settled(prepared.plan.rows, prepared.plan.masked)
        pooled = self._pooler.rows(rows, self.columns) if ranks.is_output else None
        prompts = None
        if pipeline.is_last:
            prompts = PromptScores.from_rows(rows, self.columns, self._kernels.sampling, self.history)
        self.forward.lay_out(rows, self.history if pipeline.is_first else None)
        self.forward.receive()
        began = self.device.now()
        self.logits = self.forward.run(pooled, prompts)
        clock = StepClock(prepared.prepared, began, self.device.now(), waited)
        if pipeline.is_first and pipeline.size > 1:
            self._feedback.expect(step, rows)
        return ComputedStep(step, rows, self.logits, pooled, prompts, clock)

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

    def _settled(self, planned: Rows, masked: NDArray[np.int32]) -> Rows:
        """Return the plan's rows at their true positions. The first and the last stage have the sampled tokens and
        compute the positions; where these may differ from the plan's, every stage sends them to the next one.

        Args:
            masked: int32[constrained rows that sample], their slots.

        Raises: PlanError, also if the last stage's own positions differ from those it received.
        """
        pipeline = self._ranks.pipeline
        if pipeline.is_first and pipeline.size > 1:
            self._take_feedback(planned)
        rows = planned
        if pipeline.is_first or self._ranks.is_output:
            rows = self.drafts.settle(planned, self.history, masked)
        if pipeline.size == 1 or not (self.drafts.speculates or len(masked)):
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
            k = message.step.num_speculative_tokens
            body = Outcome.empty_message(message.rows, k)
            if self._ranks.tensor_parallel.is_first:
                self._ranks.pipeline.receive_feedback(body)
            outcome = Outcome.from_message(self._ranks.tensor_parallel.broadcast(body), k)
            stays = self._feedback.wanted(message)
            kept = message.rows.select(stays)
            self._keep(kept.slots, kept.firsts, outcome.select(stays))

    # -- sampling ------------------------------------------------------------------------------------------------

    def sample(self, pending: ComputedStep, masks: MaskInbox) -> NativeResult | ForwardDone:
        """Sample a step with the masks that have arrived."""
        result = self._sample(pending, masks)
        self._ended = time.monotonic()
        return result

    def _sample(self, pending: ComputedStep, masks: MaskInbox) -> NativeResult | ForwardDone:
        ranks = self._ranks
        if not ranks.is_output:
            if ranks.pipeline.size == 1 and pending.sampling:
                message = ranks.tensor_parallel.broadcast(pending.empty_message())
                outcome = Outcome.from_message(message, pending.step.num_speculative_tokens)
                self._keep(pending.slots, pending.firsts, outcome)
            return ForwardDone(pending.clock.times(self.device.now()))
        sampled = self._sampled(pending, masks)
        if pending.sampling:
            self._keep(pending.slots, pending.firsts, Outcome(sampled.ids, sampled.counts, _NO_DRAFTS))
        drafts = self._proposed(pending, sampled)
        if pending.sampling and ranks.assignment.world_size > 1:
            message = Outcome(sampled.ids, sampled.counts, drafts).to_message(pending.empty_message())
            if ranks.pipeline.size > 1:
                ranks.pipeline.send_feedback(message)
            else:
                ranks.tensor_parallel.broadcast(message)
        return NativeResult.begin(pending, sampled, drafts, self.device)

    def _sampled(self, pending: ComputedStep, masks: MaskInbox) -> SampledTokens:
        """Wait for the step's masks as long as no other request is held back, then sample all rows but those that have
        none, which get no token (left-out row, docs/invariants.md).

        Raises: RanksLost, if the epoch ends meanwhile.
        """
        masked, logits, grammar, kept = unpack(pending.step.masked), pending.logits, None, None
        assert logits is not None, "the output rank has the logits"
        if len(masked):
            # On a GPU all masks are there
            forward = Forward(pending.clock.began(), pending.clock.ended()) if self.device.is_host else ENDLESS
            taken = masks.take(pending.step.step_id, masked, forward)
            grammar = joined(taken.parts)
            kept = ~np.isin(pending.slots, [*taken.left_out]) if taken.left_out else None
        drafts = pending.rows.drafts[pending.rows.samples]
        return self._sampler.sample(logits, pending.slots, pending.firsts, grammar, drafts, kept)

    def _keep(self, slots: NDArray[np.int32], firsts: NDArray[np.int32], outcome: Outcome) -> None:
        """Store the outcome of rows whose first tokens have positions `firsts`: tokens in the history, drafts for the
        next row of the slot. A row without a token stores nothing, and the next one begins with the last known
        token."""
        rows = SamplePositions.from_rows(slots, firsts, outcome.counts - np.int32(1))
        self.history.append(rows.slots, rows.positions, outcome.ids)
        self.drafts.advance(slots, firsts, outcome.counts)
        self.drafts.propose(slots, outcome.drafts)

    def _proposed(self, pending: ComputedStep, sampled: SampledTokens) -> NDArray[np.int32]:
        """Return the drafts for the next step, int32[sampling rows, k], and advance the drafter's own state."""
        k = pending.step.num_speculative_tokens
        if self.proposer is None or (pending.step.speculation_rests and self.proposer.rest()):
            return np.full((len(sampled.counts), k), NO_DRAFT, np.int32)
        rows, stay, samples = pending.rows, pending.rows.counts, pending.rows.samples
        kept = sampled.counts > 0
        if has_any(rows.drafts) or not has_all(kept):
            stay = stay.copy()
            stay[rows.samples] += sampled.counts - 1 - rows.drafts[rows.samples]
        if not has_all(kept):  # without the last known token, such a row is a chunk that samples nothing
            samples = samples.copy()
            samples[rows.samples] = kept
        states, least = self._states(rows.counts, stay), pending.step.min_acceptance
        some = stay > 0
        starts, stay, samples = rows.starts[some], stay[some], samples[some]
        drafts = np.full((len(kept), k), NO_DRAFT, np.int32)
        if len(stay):
            advance = Advance(rows.slots[some], rows.generations[some], starts, stay, samples, states, least)
            drafts[kept] = self.proposer.propose(advance, k)
        self.drafts.propose(pending.slots, drafts)
        return drafts

    def _states(self, counts: NDArray[np.int32], stay: NDArray[np.int32]) -> list[torch.Tensor]:
        """Return the hidden states that the drafter reads, [tokens, hidden] each, of the first `stay` of each row's
        `counts` positions."""
        states = self.forward.tapped()
        if not states or stay is counts or (stay == counts).all():
            return states
        owners, offsets = spread(counts)
        tokens = torch.from_numpy(np.flatnonzero(offsets < stay[owners]))
        return [each[tokens] for each in states]
