"""Everything of a rank that lives one epoch: the batch on the host, the translation of plans, and the steps."""

import time
from functools import partial

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.codec import pack, unpack
from protocol.membership import Assignment, InitializeCache
from protocol.steps import GrammarOutput, SchedulerOutput
from services.worker.backends.pending_step import PendingStep
from services.worker.backends.pooling import Pooler
from services.worker.backends.vllm.engine import VllmEngine
from services.worker.backends.vllm.output import ExecutedVllmStep, VllmOutput
from services.worker.backends.vllm.plan import RESERVED_BLOCKS, PlanTranslator, TranslatedMasks
from services.worker.backends.vllm.process_groups import ProcessGroups
from services.worker.backends.vllm.row_masks import RowMasks
from services.worker.backends.vllm.sampled_steps import SampledStep
from services.worker.backends.vllm.stages import StageOutcomes
from services.worker.batch.slots import SlotTable
from services.worker.device.device_times import StepClock
from services.worker.runner import ForwardDone, Output


class VllmEpoch:
    """One epoch of a rank. Allocates the engine's KV cache.

    Args:
        leaves_rows_out: constrained rows may be left out (left-out row, docs/invariants.md)

    Raises: RanksLost, also from `execute` and `sample`.
    """

    def __init__(
        self,
        engine: VllmEngine,
        groups: ProcessGroups,
        assignment: Assignment,
        init: InitializeCache,
        leaves_rows_out: bool,
    ) -> None:
        self._engine, self._groups = engine, groups
        self._reports = assignment.rank == assignment.output_rank
        self._leaves_rows_out = leaves_rows_out
        with groups.detect_lost_ranks():
            engine.allocate(init.num_blocks + RESERVED_BLOCKS)
        self.table = SlotTable(
            *(assignment.num_slots, assignment.block_size, init.num_blocks, init.max_model_len),
            leaves_rows_out=leaves_rows_out,
            groups=engine.groups,
        )
        self._pooler = None
        if engine.generates:
            zeros = partial(torch.zeros, device=engine.platform.where)
            self._pooler = Pooler(assignment.num_slots, engine.hidden_size, zeros)
        batch, speculation = engine.runner, assignment.speculation
        self._translator = PlanTranslator(
            self.table,
            engine.vocab_size,
            batch.requests,
            batch.num_prompt_logprobs,
            speculation.num_speculative_tokens if speculation else 0,
            engine.platform.generator,
            engine.pooler,
            batch.encoder_cache,
            batch._init_mrope_positions if batch.uses_mrope else None,  # noqa: SLF001  vLLM calls it for new requests
        )
        self._pipeline = groups.pipeline
        self._outcomes = StageOutcomes(self._pipeline, assignment.num_slots, batch, self._translator)
        self._pending = PendingStep[ExecutedVllmStep]()

    def execute(self, step: SchedulerOutput) -> None:
        """Execute the forward pass of a step, as `ModelRunner.execute_model`."""
        self._pending.require_none()
        engine, table = self._engine, self.table
        planned = table.apply(step)
        step, failed = self._load_adapters(step)
        self._outcomes.take(step.new, planned.slots)
        vllm_step, rows, ids = self._translator.translate(step, planned)
        requested = table.logprobs[rows.slots], table.prompt_logprobs[rows.slots]
        pooled = self._pooler.rows(rows, table) if self._reports and self._pooler is not None else None
        if table.num_states and self._leaves_rows_out:
            engine.states.keep(table.states[unpack(step.masked)] + RESERVED_BLOCKS)
        prepared = time.monotonic()
        activations = engine.receive(vllm_step.total_num_scheduled_tokens)
        began = engine.platform.now()
        with self._groups.detect_lost_ranks():
            result = engine.execute(vllm_step, activations)
        if pooled is not None:
            engine.pool(pooled, ids, rows)
        clock = StepClock(prepared, began, engine.platform.now())
        executed = ExecutedVllmStep(step, rows, ids, *requested, clock, pooled, result, failed)
        self._pending.put(step.step_id, executed)

    def _load_adapters(self, step: SchedulerOutput) -> tuple[SchedulerOutput, bytes]:
        """Load the adapters of requests that enter. Return the step without those that a rank cannot load, and the
        slots of their requests: the ranks must compute the same."""
        asked = [(request.slot, request.lora) for request in step.new if request.lora is not None]
        if not asked:
            return step, b""
        runner, released = self._engine.runner, self._translator.request_ids(unpack(step.released))
        in_use = {state.lora_request for name, state in runner.requests.items() if name not in released}
        for adapter in in_use - {None}:  # for a new one, vLLM drops the one that was named least recently
            runner.add_lora(adapter)
        loaded = self._groups.agree([self._engine.loads(adapter) for _, adapter in asked])
        failed = [slot for (slot, _), done in zip(asked, loaded, strict=True) if not done]
        new = [replace(request, lora=None) if request.slot in failed else request for request in step.new]
        return replace(step, new=new), pack(failed)

    def sample(self, grammar: GrammarOutput | None) -> Output:
        """Sample the executed step, as `ModelRunner.sample_tokens`."""
        p = self._pending.take()
        step, engine, translator = p.step, self._engine, self._translator
        if engine.pooler is not None:
            if not self._reports:
                return ForwardDone(p.clock.times(engine.platform.now()))
            return VllmOutput(p, SampledStep(p.result), engine.platform.now())
        if not self._pipeline.is_last:
            self._outcomes.feedback.expect(step, p.rows)
            return ForwardDone(p.clock.times(engine.platform.now()))
        masks = self._masks(p, grammar)
        if masks.left_out:
            masked = translator.request_ids(unpack(step.masked))
            engine.states.take_back([masked.index(name) for name in masks.left_out])
        with self._groups.detect_lost_ranks():
            sampled = engine.sample(masks, p.ids)
        translator.drafts.store(*engine.take_drafts())
        translator.drafts.drop(masks.left_out)
        if not self._pipeline.is_first:
            self._outcomes.send(step, p.rows, p.ids, sampled.get())
        positions = zip(p.ids, p.rows.ends.tolist(), p.rows.samples.tolist(), strict=True)
        translator.placeholders.add(sampled, {name: end for name, end, samples in positions if samples})
        ended = engine.platform.now()
        if not self._reports:
            return ForwardDone(p.clock.times(ended))
        needs_drafts = step.num_speculative_tokens and step.has_structured_output_requests
        proposed = translator.drafts.column(p.ids, step.num_speculative_tokens) if needs_drafts else None
        embeddings = engine.platform.download(p.pooled.embeddings) if p.pooled is not None else None
        return VllmOutput(p, sampled, ended, embeddings, masks.acceptable, proposed)

    def _masks(self, p: ExecutedVllmStep, grammar: GrammarOutput | None) -> TranslatedMasks:
        """Return the masks of a step, and the constrained rows that have none.

        Every rank samples, and other ranks may have read other masks by now. So they use those of the output rank.
        """
        if not p.step.has_structured_output_requests:
            return TranslatedMasks()
        masks = RowMasks(unpack(p.step.masked), p.rows, self._engine.vocab_size)
        if self._reports and grammar is not None:
            masks.add(grammar)
        self._groups.broadcast(masks.numbers)
        return self._translator.translate_masks(masks, p.rows)

    def release(self, slots: NDArray[np.int32]) -> None:
        self.table.release(slots)
        self._engine.execute(self._translator.translate_release(slots))
