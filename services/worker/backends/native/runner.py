"""The native backend: one rank that computes with torch and its own kernels."""

import hashlib
import logging
import socket
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded, Shard
from protocol.steps import GrammarOutput, SchedulerOutput
from services.checkpoint import default_dtype
from services.config import WorkerConfig
from services.worker import machine
from services.worker.backends.epoch_value import EpochValue
from services.worker.backends.kv_blocks import context_limit, num_kv_blocks
from services.worker.backends.native import drafters
from services.worker.backends.native.drafters.base import Drafter, TargetModel
from services.worker.backends.native.epoch import NativeEpoch
from services.worker.backends.native.kernels import selection
from services.worker.backends.native.kernels.quantized_weight import GROUP, Quantization
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.loading import has_blocks
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart, tensor_parallel_sizes
from services.worker.distributed.ranks import Ranks
from services.worker.runner import Identity, LoadError, Output, Progress
from services.worker.weights import (
    Checkpoint,
    HashedCheckpoint,
    checkpoint_path,
    model_digest,
    open_checkpoint,
)

log = logging.getLogger("runahead.worker")


class _Loaded(NamedTuple):
    """Result of `load`, until `leave`; the cache of an epoch is created from it."""

    assignment: Assignment
    ranks: Ranks
    model: Model
    drafter: Drafter | None
    """None on other ranks than the output rank, and without speculation."""


class NativeRunner:
    """A `ModelRunner`. Llama, Mistral, Qwen2 and Qwen3 checkpoints in float32 or bfloat16.

    Weights are kept from epoch to epoch. Everything else ends with the epoch.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._identity: Identity | None = None
        self._model: Model | None = None
        self._contents: dict[str, str] = {}
        """Digest of each part of the weights."""
        self._num_loads = 0
        """Number of times that weights were read."""
        self._drafter: Drafter | None = None
        self._drafter_for: tuple[object, ...] = ()
        self._ranks: Ranks | None = None
        """Set at the beginning of `load`, so that `abort` ends a join as well."""
        self._loaded = EpochValue[_Loaded]("load")
        self._epoch = EpochValue[NativeEpoch]("init_kv_cache")

    @property
    def epoch(self) -> NativeEpoch:
        """Raises: RuntimeError, before `init_kv_cache` and after `leave`."""
        return self._epoch.get()

    # -- from process to epoch -----------------------------------------------------------------------------------

    def identify(self) -> Identity:
        """Return the model's identity. It is computed once, so that it stays that of the registration."""
        if self._identity is None:
            path = checkpoint_path(self._config)
            config = ModelConfig.from_checkpoint(path)
            self._identity = Identity(
                model_hash=self._digest(path, open_checkpoint(path)),
                dtype=str(_dtype(self._config, config)).removeprefix("torch."),
                tensor_parallel_sizes=tensor_parallel_sizes(config, self._group),
                max_pipeline_parallel_size=config.num_layers,
            )
        return self._identity

    @torch.inference_mode()
    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        """Join the other ranks and read the weights. The number of threads is the user's, or this process's cores
        divided by the ranks on this machine."""
        self.leave()
        self._ranks = ranks = Ranks(assignment, listener)
        ranks.join()
        threads = self._config.threads or max(1, machine.cores() // ranks.on_this_machine)
        # One core stays free for the services that start at the same time. OpenMP's barriers would wait for it.
        torch.set_num_threads(max(1, threads - 1))
        model = self._weights(assignment.shard, progress)
        limit = context_limit(assignment.max_model_len, model.part.whole.max_position)
        drafter = self._drafter_of(assignment, model, limit) if ranks.is_output else None
        torch.set_num_threads(threads)
        model.kernels.use_threads(threads)
        self._loaded.set(_Loaded(assignment, ranks, model, drafter))
        bytes_per_block = model.bytes_per_block(assignment.block_size)
        bytes_per_block += drafter.bytes_per_block if drafter is not None else 0
        return Loaded(
            model_hash=self.identify().model_hash,
            vocab_size=model.part.whole.vocab_size,
            max_model_len=limit,
            bytes_per_block=bytes_per_block,
            num_blocks=num_kv_blocks(self._config, assignment, bytes_per_block, limit),
            hidden_size=model.part.whole.hidden_size,
            num_loads=self._num_loads,
            contents=self._contents,
        )

    def _weights(self, shard: Shard, progress: Progress) -> Model:
        """Return the weights: those of an earlier epoch, if the shard is the same, else read now."""
        if self._model is None or self._model.part.shard != shard:
            self._model = None  # freed before the next ones are read
            self._num_loads += 1
            path = checkpoint_path(self._config)
            config, checkpoint = ModelConfig.from_checkpoint(path), open_checkpoint(path)
            if self._digest(path, checkpoint) != self.identify().model_hash:
                raise LoadError(f"the files of {path} have changed; start this worker again")
            dtype, features = _dtype(self._config, config), selection.processor_features()
            wanted, quantization = self._config.kernels, self._quantization
            quantized = quantization != "none" and (
                quantization is not None or has_blocks(checkpoint, config)
            )
            invariant = self._config.batch_invariant
            choice = selection.choose(wanted, self._config.device, dtype, features, quantized, invariant)
            log.info("%s", choice.describe(features))
            part, hashed = ModelPart.from_shard(config, shard, self._group), HashedCheckpoint(checkpoint)
            model = Model(part, hashed, dtype, selection.create(choice), progress, quantization)
            log.info("weights: %.1f MiB in %s", model.num_bytes / 2**20, model.weight_types)
            self._model, self._contents = model, hashed.contents
        return self._model

    @property
    def _quantization(self) -> Quantization | Literal["none"] | None:
        """Raises: LoadError, for a method of another backend."""
        match self._config.quantization:
            case None | "int8" | "int4" | "none" as known:
                return known
            case other:
                raise LoadError(f"--quantization {other}: the native backend computes int8 and int4")

    @property
    def _group(self) -> int:
        """Inputs that must not be cut."""
        return GROUP if self._quantization in ("int8", "int4") else 1

    def _digest(self, path: Path, checkpoint: Checkpoint) -> str:
        """Return the digest of the model and of settings that change its values: all ranks have the same."""
        digest, quantization = model_digest(path, checkpoint), self._config.quantization
        settings = [quantization] if quantization is not None else []
        settings += ["batch-invariant"] if self._config.batch_invariant else []
        return hashlib.sha256(" ".join([digest, *settings]).encode()).hexdigest() if settings else digest

    def _drafter_of(self, assignment: Assignment, model: Model, limit: int) -> Drafter | None:
        """Return the drafter: that of an earlier epoch with the same model, else read now."""
        if (speculation := assignment.speculation) is None:
            return None
        wanted_for = speculation, model, assignment.block_size, limit
        if self._drafter is None or self._drafter_for != wanted_for:
            self._drafter = None  # freed before the next one is read
            path = checkpoint_path(self._config)
            target = TargetModel(
                speculation, model, path, open_checkpoint(path), assignment.block_size, limit
            )
            self._drafter, self._drafter_for = drafters.create(target), wanted_for
        return self._drafter

    @torch.inference_mode()
    def init_kv_cache(self, init: InitializeCache) -> None:
        loaded = self._loaded.get()
        self._epoch.end()  # freed before the next one is allocated
        self._epoch.set(NativeEpoch(loaded.model, loaded.ranks, loaded.drafter, loaded.assignment, init))

    def leave(self) -> None:
        self._ranks = None
        self._loaded.end()
        self._epoch.end()

    def abort(self) -> None:
        if (ranks := self._ranks) is not None:
            ranks.abort()

    def shutdown(self) -> None:
        self.leave()
        self._model = self._drafter = None

    # -- steps of an epoch ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> None:
        self.epoch.execute(step)

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        return self.epoch.sample(grammar)

    def release(self, slots: NDArray[np.int32]) -> None:
        self.epoch.release(slots)


def _dtype(worker: WorkerConfig, model: ModelConfig) -> torch.dtype:
    wanted = worker.dtype if worker.dtype != "auto" else default_dtype(worker.model) or model.dtype
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32
