"""The native backend: one rank that computes with torch and compiled kernels on the CPU."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from services.checkpoint import WEIGHT_FILES, CheckpointError, default_dtype, resolve
from services.config import WorkerConfig
from services.worker.backends.native import machine
from services.worker.backends.native.attention import Context
from services.worker.backends.native.batch import Batch
from services.worker.backends.native.config import ModelConfig
from services.worker.backends.native.kv_cache import KVCache
from services.worker.backends.native.model import Model
from services.worker.backends.native.sampler import Sampler, apply_grammar
from services.worker.backends.native.state import TokenHistory
from services.worker.backends.native.weights import Checkpoint
from services.worker.batch import Rows, SlotTable
from services.worker.runner import Identity, LoadError, Output, Progress

MEMORY_SHARE = 0.25
"""Of free memory for the KV cache, unless `kv_cache_memory_bytes` says it. Pages are taken when first used."""


@dataclass(frozen=True)
class _Pending:
    """A step between its forward pass and its sampling."""

    step: SchedulerOutput
    rows: Rows
    logits: torch.Tensor
    started: float


@dataclass(frozen=True)
class _Sampled:
    """A step's result. On this device the ids are there at once, in memory that no later step touches (S3-1)."""

    step: SchedulerOutput
    rows: Rows
    ids: torch.Tensor
    started: float

    def get(self) -> ModelRunnerOutput:
        samples = self.rows.samples
        return ModelRunnerOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            slots=self.rows.slots[samples].tobytes(),
            generations=self.rows.generations[samples].tobytes(),
            counts=np.ones(len(self.ids), np.int32).tobytes(),
            token_ids=self.ids.numpy().astype(np.int32).tobytes(),
            started=self.started,
            ended=time.monotonic(),
        )


class NativeRunner:
    """A `ModelRunner`. Llama, Mistral, Qwen2 and Qwen3 checkpoints in float32 or bfloat16."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._pending: _Pending | None = None

    def identify(self) -> Identity:
        directory = self._directory()
        config = ModelConfig.from_directory(directory)
        digest = Checkpoint(directory, _silent).digest((directory / "config.json").read_bytes())
        return Identity(digest, str(_dtype(self._config, config)).removeprefix("torch."))

    def _directory(self) -> Path:
        try:
            return resolve(self._config.model, self._config.revision, WEIGHT_FILES)
        except CheckpointError as error:
            raise LoadError(str(error)) from error

    @torch.inference_mode()
    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        torch.set_num_threads(self._config.threads or machine.cores())
        directory = self._directory()
        config = ModelConfig.from_directory(directory)
        limit = _context(config, assignment.max_model_len)
        checkpoint = Checkpoint(directory, progress)
        self._dtype = _dtype(self._config, config)
        self._model = Model(config, checkpoint, self._dtype)
        self._sampler = Sampler()
        self._assignment = assignment
        bytes_per_block = KVCache.bytes_per_block(config, assignment.block_size, self._dtype)
        return Loaded(
            model_hash=checkpoint.digest((directory / "config.json").read_bytes()),
            vocab_size=config.vocab_size,
            max_model_len=limit,
            bytes_per_block=bytes_per_block,
            num_blocks=self._affordable(bytes_per_block, limit),
        )

    def _affordable(self, bytes_per_block: int, max_model_len: int) -> int:
        """Blocks that fit; not more than all slots together could fill."""
        budget = self._config.kv_cache_memory_bytes or int(machine.free_memory() * MEMORY_SHARE)
        blocks = budget // bytes_per_block
        if blocks < 1:
            raise LoadError(
                f"{budget} bytes hold no KV block; one takes {bytes_per_block}: raise --kv-cache-memory-bytes"
            )
        per_request = -(-max_model_len // self._assignment.block_size)
        return int(min(blocks, self._assignment.num_slots * per_request))

    @torch.inference_mode()
    def init_kv_cache(self, init: InitializeCache) -> None:
        slots, block_size = self._assignment.num_slots, self._assignment.block_size
        self._cache = KVCache(self._model.config, init.num_blocks, block_size, self._dtype)
        self._table = SlotTable(slots, block_size, init.num_blocks, init.max_model_len)
        self._history = TokenHistory(slots, init.max_model_len, self._model.config.vocab_size)
        self._pending = None

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> None:
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.step.step_id} was executed but never sampled")
        started = time.monotonic()
        rows = self._table.apply(step)
        for request in step.new:
            self._history.assign(request)
        batch = Batch.of(rows)
        ids = self._history.gather(batch.slots, batch.positions)
        logits = self._model.forward(ids, Context(batch, self._cache, self._table.block_table))
        self._pending = _Pending(step, rows, logits, started)

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no step was executed that could be sampled")
        step, rows = pending.step, pending.rows
        slots, positions = rows.slots[rows.samples], rows.ends[rows.samples]
        if step.has_structured_output_requests:
            if grammar is None or grammar.step_id != step.step_id:
                raise RuntimeError(f"step {step.step_id} needs its own grammar bitmask to be sampled")
            apply_grammar(pending.logits, slots, grammar)
        ids = self._sampler.sample(pending.logits, self._table, slots, positions)
        self._history.append(slots, positions, ids)
        return _Sampled(step, rows, ids, pending.started)

    def release(self, slots: NDArray[np.int32]) -> None:
        self._table.release(slots)

    def leave(self) -> None:
        for name in ("_cache", "_table", "_history"):
            self.__dict__.pop(name, None)
        self._pending = None

    def abort(self) -> None:
        """Nothing here waits for another rank."""

    def shutdown(self) -> None:
        for name in ("_model", "_cache", "_table", "_history"):
            self.__dict__.pop(name, None)
        self._pending = None


def _silent(phase: str, fraction: float) -> None:
    """Nobody watches."""


def _dtype(worker: WorkerConfig, model: ModelConfig) -> torch.dtype:
    wanted = worker.dtype if worker.dtype != "auto" else default_dtype(worker.model) or model.dtype
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def _context(config: ModelConfig, wanted: int) -> int:
    if wanted > config.max_position:
        raise LoadError(
            f"max_model_len {wanted} is more than the {config.max_position} positions of the model; "
            "lower --max-model-len"
        )
    return wanted or config.max_position
