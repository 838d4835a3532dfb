"""The vLLM backend: vLLM's own worker of one rank computes what the scheduler plans.

On the CPU vLLM computes a step before it returns, and remembers the tokens that it sampled. So steps that were planned
ahead find them there, however many are on their way, and the worker is told of a request's tokens once.
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
from services.worker.backends.vllm.checkpoint import Facts
from services.worker.backends.vllm.engine import Engine, Options
from services.worker.backends.vllm.group import Group
from services.worker.backends.vllm.plan import RESERVED_BLOCKS, Plans
from services.worker.backends.vllm.result import Asked, Result
from services.worker.batch.slots import Rows, SlotTable
from services.worker.runner import ForwardDone, Identity, LoadError, Output, Progress
from services.worker.weights import located


@dataclass(frozen=True)
class _ExecutedStep:
    """A step between its forward pass and its sampling."""

    step: SchedulerOutput
    rows: Rows
    ids: list[str]
    asked: Asked
    pooled: PooledRows | None
    """None where no hidden state is asked for, and where another rank reports."""
    times: StepTimes
    """Up to the end of the forward pass."""


class VllmRunner:
    """A `ModelRunner`. Models of vLLM that are one group of full attention, on its CPU build."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._facts: Facts | None = None
        self._engine: Engine | None = None
        self._group: Group | None = None
        self._pending = PendingStep[_ExecutedStep]()

    def identify(self) -> Identity:
        """As it was when first asked: what is in memory stays what was registered."""
        if self._facts is None:
            self._facts = Facts.of(located(self._config), self._config)
        return Identity(self._facts.digest, self._facts.dtype, self._facts.tensor_parallel_sizes)

    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        """A group of one keeps its weights from epoch to epoch; of more ranks they are read again, since vLLM's layers
        hold on to the groups that they were made with."""
        self._assignment = assignment
        digest, options = self.identify().model_hash, self._options(assignment)
        if self._engine is None or self._engine.options != options:
            self._close()
            progress("weights", 0.0)
            self._group = Group(assignment, listener)
            with self._group.watched():
                self._engine = Engine(options, assignment, self._group)
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

    def _options(self, assignment: Assignment) -> Options:
        directory = located(self._config)
        if Facts.of(directory, self._config) != self._facts:
            raise LoadError(f"the files in {directory} have changed; start this worker again")
        return Options.of(directory, self.identify().dtype, self._config, assignment)

    def init_kv_cache(self, init: InitializeCache) -> None:
        (engine, group), assignment = self._parts(), self._assignment
        with group.watched():
            engine.allocate(init.num_blocks + RESERVED_BLOCKS)
        self._table = SlotTable(
            assignment.num_slots, assignment.block_size, init.num_blocks, init.max_model_len
        )
        batch = engine.runner
        self._pooler = Pooler(assignment.num_slots, engine.hidden_size)
        how = assignment.speculation
        self._plans = Plans(
            self._table,
            engine.vocab_size,
            batch.requests,
            batch.num_prompt_logprobs,
            how.num_speculative_tokens if how else 0,
        )
        self._pending = PendingStep()

    def _parts(self) -> tuple[Engine, Group]:
        if self._engine is None or self._group is None:
            raise RuntimeError("no model is loaded in this epoch")
        return self._engine, self._group

    def execute_model(self, step: SchedulerOutput) -> None:
        self._pending.require_none()
        (engine, group), table = self._parts(), self._table
        theirs, rows, ids = self._plans.translated(step, table.apply(step))
        asked = Asked(table.logprobs[rows.slots], table.prompt_logprobs[rows.slots])
        pooled = self._pooler.rows(step, rows, table) if self._reports else None
        prepared = time.monotonic()
        with group.watched():
            engine.execute(theirs)
        if pooled is not None:
            engine.pool(pooled, ids, rows)
        times = StepTimes(prepared=prepared, forward_began=prepared, forward_ended=time.monotonic())
        self._pending.put(_ExecutedStep(step, rows, ids, asked, pooled, times))

    @property
    def _reports(self) -> bool:
        return self._assignment.rank == self._assignment.output_rank

    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        p = self._pending.take()
        step, grammar = p.step, own_grammar(p.step, grammar)
        (engine, group), plans = self._parts(), self._plans
        masks, acceptable = plans.grammar(grammar, p.rows) if grammar is not None else (None, None)
        with group.watched():
            theirs = engine.sample(masks, p.ids, acceptable)
        plans.drafts.propose(engine.drafts())
        times = replace(p.times, sampled=time.monotonic())
        if not self._reports:
            return ForwardDone(times)
        looked_at = step.num_speculative_tokens and step.has_structured_output_requests
        proposed = plans.drafts.column(p.ids, step.num_speculative_tokens) if looked_at else None
        return Result(step, p.rows, p.ids, p.asked, theirs, times, p.pooled, acceptable, proposed)

    def release(self, slots: NDArray[np.int32]) -> None:
        self._table.release(slots)
        self._parts()[0].execute(self._plans.released(slots))

    def leave(self) -> None:
        self._pending = PendingStep()
        if self._group is not None and self._group.is_of_several:
            self._close()
        elif self._engine is not None:
            self._engine.forget()
        for name in ("_table", "_plans", "_pooler"):
            self.__dict__.pop(name, None)

    def _close(self) -> None:
        """Weights, cache, batch and groups are gone."""
        engine, group, self._engine, self._group = self._engine, self._group, None, None
        if engine is not None:
            engine.close()
        if group is not None:
            group.leave()

    def abort(self) -> None:
        group = self._group
        if group is not None:
            group.abort()

    def shutdown(self) -> None:
        self._close()
