"""The vLLM backend: vLLM's own worker of one rank executes the scheduler's plans.

On the CPU, vLLM's call returns when the step is computed, and vLLM stores the tokens that it sampled. So a step that
was planned ahead finds them there at any depth, and vLLM receives the tokens of a request once.
"""

import socket
import time
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import GrammarOutput, SchedulerOutput, StepTimes
from services.config import WorkerConfig
from services.worker.backends.kv_blocks import num_kv_blocks
from services.worker.backends.pending_step import PendingStep, own_grammar
from services.worker.backends.pooling import PooledRows, Pooler
from services.worker.backends.vllm.checkpoint import CheckpointInfo
from services.worker.backends.vllm.engine import VllmEngine
from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.backends.vllm.output import RequestedLogprobs, VllmOutput
from services.worker.backends.vllm.plan import RESERVED_BLOCKS, PlanTranslator
from services.worker.backends.vllm.process_groups import ProcessGroups
from services.worker.batch.slots import Rows, SlotTable
from services.worker.runner import ForwardDone, Identity, LoadError, Output, Progress
from services.worker.weights import located


@dataclass(frozen=True)
class _ExecutedStep:
    """A step between its forward pass and its sampling."""

    step: SchedulerOutput
    rows: Rows
    ids: list[str]
    requested: RequestedLogprobs
    pooled: PooledRows | None
    """None if no row needs a hidden state, or if another rank reports the step."""
    times: StepTimes
    """Times until the end of the forward pass."""


class VllmRunner:
    """A `ModelRunner` for models of vLLM with one group of full attention, on its CPU build."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._checkpoint: CheckpointInfo | None = None
        self._engine: VllmEngine | None = None
        self._groups: ProcessGroups | None = None
        self._pending = PendingStep[_ExecutedStep]()

    def identify(self) -> Identity:
        """Return the properties of the checkpoint, read at the first call: those of the weights in memory."""
        if self._checkpoint is None:
            self._checkpoint = CheckpointInfo.read(located(self._config), self._config)
        return Identity(
            self._checkpoint.digest, self._checkpoint.dtype, self._checkpoint.tensor_parallel_sizes
        )

    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        """Load the weights. A single rank keeps them from epoch to epoch. Several ranks read them again, because vLLM's
        layers keep references to their process groups."""
        self._assignment = assignment
        digest, options = self.identify().model_hash, self._options(assignment)
        if self._engine is None or self._engine.options != options:
            self._close()
            progress("weights", 0.0)
            self._groups = ProcessGroups(assignment, listener)
            with self._groups.detect_lost_ranks():
                self._engine = VllmEngine(options, assignment, self._groups)
        elif listener is not None:
            listener.close()
        progress("weights", 1.0)
        engine = self._engine
        return Loaded(
            model_hash=digest,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            bytes_per_block=engine.bytes_per_block,
            num_blocks=num_kv_blocks(
                self._config, assignment, engine.bytes_per_block, engine.max_model_len, RESERVED_BLOCKS
            ),
            hidden_size=engine.hidden_size,
        )

    def _options(self, assignment: Assignment) -> EngineOptions:
        directory = located(self._config)
        if CheckpointInfo.read(directory, self._config) != self._checkpoint:
            raise LoadError(f"the files in {directory} have changed; start this worker again")
        return EngineOptions.from_config(directory, self.identify().dtype, self._config, assignment)

    def init_kv_cache(self, init: InitializeCache) -> None:
        (engine, groups), assignment = self._parts(), self._assignment
        with groups.detect_lost_ranks():
            engine.allocate(init.num_blocks + RESERVED_BLOCKS)
        self._table = SlotTable(
            assignment.num_slots, assignment.block_size, init.num_blocks, init.max_model_len
        )
        batch = engine.runner
        self._pooler = Pooler(assignment.num_slots, engine.hidden_size)
        speculation = assignment.speculation
        self._translator = PlanTranslator(
            self._table,
            engine.vocab_size,
            batch.requests,
            batch.num_prompt_logprobs,
            speculation.num_speculative_tokens if speculation else 0,
        )
        self._pending = PendingStep()

    @property
    def engine(self) -> VllmEngine:
        """Raises: RuntimeError, if no model is loaded."""
        return self._parts()[0]

    @property
    def table(self) -> SlotTable:
        """Columns of the epoch's slots."""
        return self._table

    def _parts(self) -> tuple[VllmEngine, ProcessGroups]:
        if self._engine is None or self._groups is None:
            raise RuntimeError("no model is loaded in this epoch")
        return self._engine, self._groups

    def execute_model(self, step: SchedulerOutput) -> None:
        self._pending.require_none()
        (engine, groups), table = self._parts(), self._table
        vllm_step, rows, ids = self._translator.translate(step, table.apply(step))
        requested = RequestedLogprobs(table.logprobs[rows.slots], table.prompt_logprobs[rows.slots])
        pooled = self._pooler.rows(step, rows, table) if self._reports else None
        prepared = time.monotonic()
        with groups.detect_lost_ranks():
            engine.execute(vllm_step)
        if pooled is not None:
            engine.pool(pooled, ids, rows)
        times = StepTimes(prepared=prepared, forward_began=prepared, forward_ended=time.monotonic())
        self._pending.put(_ExecutedStep(step, rows, ids, requested, pooled, times))

    @property
    def _reports(self) -> bool:
        return self._assignment.rank == self._assignment.output_rank

    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        p = self._pending.take()
        step, grammar = p.step, own_grammar(p.step, grammar)
        (engine, groups), translator = self._parts(), self._translator
        masks, acceptable = (
            translator.translate_grammar(grammar, p.rows) if grammar is not None else (None, None)
        )
        with groups.detect_lost_ranks():
            output = engine.sample(masks, p.ids, acceptable)
        translator.drafts.store(engine.take_drafts())
        times = replace(p.times, sampled=time.monotonic())
        if not self._reports:
            return ForwardDone(times)
        needs_drafts = step.num_speculative_tokens and step.has_structured_output_requests
        proposed = translator.drafts.column(p.ids, step.num_speculative_tokens) if needs_drafts else None
        return VllmOutput(step, p.rows, p.ids, p.requested, output, times, p.pooled, acceptable, proposed)

    def release(self, slots: NDArray[np.int32]) -> None:
        self._table.release(slots)
        self.engine.execute(self._translator.translate_release(slots))

    def leave(self) -> None:
        self._pending = PendingStep()
        if (groups := self._groups) is not None and groups.has_several_ranks:
            self._close()
            groups.free_shared_memory()
        elif self._engine is not None:
            self._engine.drop_cache()
        for name in ("_table", "_translator", "_pooler"):
            self.__dict__.pop(name, None)

    def _close(self) -> None:
        """Free weights, cache and batch, and leave the groups."""
        engine, groups, self._engine, self._groups = self._engine, self._groups, None, None
        if engine is not None:
            engine.close()
        if groups is not None:
            groups.leave()

    def abort(self) -> None:
        groups = self._groups
        if groups is not None:
            groups.abort()

    def shutdown(self) -> None:
        self._close()
