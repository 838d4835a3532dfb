"""The vLLM backend: vLLM's own worker of one rank computes what the scheduler plans.

On the CPU vLLM computes a step before it returns, and remembers the tokens that it sampled. So steps that were planned
ahead find them there, however many are on their way, and the worker is told of a request's tokens once.
"""

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import GrammarOutput, SchedulerOutput
from services.checkpoint import WEIGHT_FILES, CheckpointError, resolve
from services.config import WorkerConfig
from services.worker import machine
from services.worker.backends.vllm.checkpoint import Facts
from services.worker.backends.vllm.engine import Engine, Options
from services.worker.backends.vllm.plan import RESERVED_BLOCKS, Plans
from services.worker.backends.vllm.result import Asked, Result
from services.worker.batch import Rows, SlotTable
from services.worker.runner import Identity, LoadError, Progress


@dataclass(frozen=True)
class _Pending:
    """A step between its forward pass and its sampling."""

    step: SchedulerOutput
    rows: Rows
    ids: list[str]
    asked: Asked
    started: float


class VllmRunner:
    """A `ModelRunner`. Models of vLLM that are one group of full attention, on its CPU build."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._facts: Facts | None = None
        self._engine: Engine | None = None
        self._pending: _Pending | None = None

    def identify(self) -> Identity:
        """As it was when first asked: what is in memory stays what was registered."""
        if self._facts is None:
            self._facts = Facts.of(self._directory(), self._config)
        return Identity(self._facts.digest, self._facts.dtype, self._facts.tensor_parallel_sizes)

    def _directory(self) -> Path:
        try:
            return resolve(self._config.model, self._config.revision, WEIGHT_FILES)
        except CheckpointError as error:
            raise LoadError(str(error)) from error

    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        """Threads are the user's number, or this process's cores."""
        self._assignment = assignment
        digest, engine = self.identify().model_hash, self._weights(assignment, listener)
        progress("weights", 1.0)
        return Loaded(
            model_hash=digest,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            bytes_per_block=engine.bytes_per_block,
            num_blocks=self._affordable(engine),
        )

    def _weights(self, assignment: Assignment, listener: socket.socket | None) -> Engine:
        """Read now, or kept from an epoch before."""
        directory, config = self._directory(), self._config
        options = Options.of(directory, self.identify().dtype, self._threads(), config, assignment)
        if self._engine is not None and self._engine.options == options:
            if listener is not None:
                listener.close()
            return self._engine
        if self._engine is not None:
            raise LoadError(
                "the scheduler's limits have changed, and vLLM cannot follow: start this worker again"
            )
        if Facts.of(directory, config) != self._facts:
            raise LoadError(f"the files in {directory} have changed; start this worker again")
        self._engine = Engine(options, assignment, listener)
        return self._engine

    def _threads(self) -> int:
        return self._config.threads or machine.cores()

    def _affordable(self, engine: Engine) -> int:
        """Blocks that fit; not more than all slots together could fill."""
        budget = machine.cache_budget(self._config.kv_cache_memory_bytes)
        blocks = budget // engine.bytes_per_block - RESERVED_BLOCKS
        if blocks < 1:
            least = (1 + RESERVED_BLOCKS) * engine.bytes_per_block
            raise LoadError(
                f"{budget} bytes hold no KV block beside the one that vLLM keeps for itself: "
                f"raise --kv-cache-memory-bytes to {least} at least"
            )
        per_request = -(-engine.max_model_len // self._assignment.block_size)
        return int(min(blocks, self._assignment.num_slots * per_request))

    def init_kv_cache(self, init: InitializeCache) -> None:
        engine, assignment = self._loaded(), self._assignment
        engine.allocate(init.num_blocks + RESERVED_BLOCKS)
        self._table = SlotTable(
            assignment.num_slots, assignment.block_size, init.num_blocks, init.max_model_len
        )
        batch = engine.runner
        self._plans = Plans(self._table, engine.vocab_size, batch.requests, batch.num_prompt_logprobs)
        self._pending = None

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("no model is loaded")
        return self._engine

    def execute_model(self, step: SchedulerOutput) -> None:
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.step.step_id} was executed but never sampled")
        started, table = time.monotonic(), self._table
        rows = table.apply(step)
        theirs = self._plans.translated(step, rows)
        asked = Asked(table.logprobs[rows.slots], table.prompt_logprobs[rows.slots])
        self._loaded().execute(theirs)
        self._pending = _Pending(step, rows, self._plans.ids(rows.slots), asked, started)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Result:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no step was executed that could be sampled")
        step = pending.step
        if step.has_structured_output_requests and (grammar is None or grammar.step_id != step.step_id):
            raise RuntimeError(f"step {step.step_id} needs its own grammar bitmask to be sampled")
        theirs = self._loaded().sample(self._plans.grammar(grammar) if grammar is not None else None)
        ended = time.monotonic()
        return Result(step, pending.rows, pending.ids, pending.asked, theirs, pending.started, ended)

    def release(self, slots: NDArray[np.int32]) -> None:
        self._table.release(slots)
        self._loaded().execute(self._plans.released(slots))

    def leave(self) -> None:
        self._pending = None
        if self._engine is not None:
            self._engine.forget()
        for name in ("_table", "_plans"):
            self.__dict__.pop(name, None)

    def abort(self) -> None:
        """One rank waits for nobody."""

    def shutdown(self) -> None:
        self.leave()
        self._engine = None
