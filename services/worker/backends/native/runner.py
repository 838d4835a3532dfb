"""The native backend: one rank that computes with torch and its own kernels."""

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded, Shard
from protocol.steps import GrammarOutput, SchedulerOutput
from services.config import WorkerConfig
from services.units import size_text
from services.worker import machine
from services.worker.backends.epoch_value import EpochValue
from services.worker.backends.kv_blocks import context_limit, num_kv_blocks
from services.worker.backends.native import drafters
from services.worker.backends.native.device.choice import device_kind
from services.worker.backends.native.device.memory_plan import MemoryPlan
from services.worker.backends.native.drafters.base import Drafter, TargetModel
from services.worker.backends.native.epoch import NativeEpoch
from services.worker.backends.native.epoch_memory import epoch_memory
from services.worker.backends.native.kernels import selection
from services.worker.backends.native.kernels.interface.kernels import Kernels
from services.worker.backends.native.kernels.quantized_weight import Quantization
from services.worker.backends.native.kernels.selection import KernelChoice
from services.worker.backends.native.layout import inputs_kept_together
from services.worker.backends.native.memory import served_dtype
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.loading import has_blocks
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart, tensor_parallel_sizes
from services.worker.backends.native.stages import NativeOutput, NativeStages, Prepared
from services.worker.batch.slots import SlotTable
from services.worker.distributed.ranks import Ranks
from services.worker.runner import SINGLE_GPU, Identity, LoadError, Progress
from services.worker.weights import (
    Checkpoint,
    HashedCheckpoint,
    checkpoint_path,
    model_digest,
    open_checkpoint,
    tokenizer_digest,
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
    """A `ModelRunner`. Llama, Mistral, Qwen2 and Qwen3 checkpoints in float32 or bfloat16, on the CPU or a GPU.

    Weights are kept from epoch to epoch. Everything else ends with the epoch. Steps are computed on a thread of their
    own (stages.py).

    Args:
        poison: for tests; see `NativeEpoch`
        after_prepare: for tests; see `NativeStages`
        create_kernels: makes the chosen kernels, with their device
    """

    def __init__(
        self,
        config: WorkerConfig,
        poison: bool = False,
        after_prepare: Prepared | None = None,
        create_kernels: Callable[[KernelChoice], Kernels] = selection.create,
    ) -> None:
        self._poison, self._after_prepare = poison, after_prepare
        self._create_kernels = create_kernels
        self._config = config
        self._identity: Identity | None = None
        self._model: Model | None = None
        self._contents: dict[str, str] = {}
        """Digest of each part of the weights."""
        self._drafter_contents: dict[str, str] = {}
        self._num_loads = 0
        """Number of times that weights were read."""
        self._drafter: Drafter | None = None
        self._drafter_for: tuple[object, ...] = ()
        self._ranks: Ranks | None = None
        """Set at the beginning of `load`, so that `abort` ends a join as well."""
        self._loaded = EpochValue[_Loaded]("load")
        self._stages = EpochValue[NativeStages]("init_kv_cache")

    @property
    def epoch(self) -> NativeEpoch:
        """The state of the epoch, when all launched steps are computed.

        Raises: RuntimeError, before `init_kv_cache` and after `leave`; the error of the step launched last.
        """
        return self._stages.get().computed_epoch

    # -- from process to epoch -----------------------------------------------------------------------------------

    def identify(self) -> Identity:
        """Return the model's identity. It is computed once, so that it stays that of the registration."""
        if self._identity is None:
            path = checkpoint_path(self._config)
            config = ModelConfig.from_checkpoint(path)
            sizes, stages = tensor_parallel_sizes(config, self._group), config.num_layers
            single = SINGLE_GPU if self._device == "cuda" else ""
            if single:
                sizes, stages = (1,), 1
            self._identity = Identity(
                model_hash=self._digest(path, open_checkpoint(path)),
                dtype=str(_dtype(self._config, config)).removeprefix("torch."),
                tensor_parallel_sizes=sizes,
                max_pipeline_parallel_size=stages,
                tokenizer=tokenizer_digest(path),
                leaves_rows_out=self._device == "cpu",  # the end of a forward pass on a GPU is not observed
                single_rank=single,
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
        contents = self._contents if drafter is None else self._contents | self._drafter_contents
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
            num_blocks=num_kv_blocks(
                self._config,
                assignment,
                bytes_per_block,
                limit,
                budget=self._cache_budget(assignment, model, drafter, limit),
            ),
            hidden_size=model.part.whole.hidden_size,
            num_loads=self._num_loads,
            contents=contents,
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
            dtype, features = _dtype(self._config, config), selection.device_features(self._device)
            wanted, quantization = self._config.kernels, self._quantization
            quantized = quantization != "none" and (
                quantization is not None or has_blocks(checkpoint, config)
            )
            invariant = self._config.batch_invariant
            eager = self._config.enforce_eager
            choice = selection.choose(wanted, self._device, dtype, features, quantized, invariant, eager)
            log.info("%s", choice.describe(features))
            part, hashed = ModelPart.from_shard(config, shard, self._group), HashedCheckpoint(checkpoint)
            model = Model(
                part,
                hashed,
                dtype,
                self._create_kernels(choice),
                progress,
                quantization,
            )
            log.info("weights: %.1f MiB in %s", model.num_bytes / 2**20, model.weight_types)
            self._model, self._contents = model, hashed.contents
        return self._model

    def _cache_budget(self, assignment: Assignment, model: Model, drafter: Drafter | None, limit: int) -> int:
        """Return the bytes for the KV cache on a device with memory of its own, else 0. Logs the account of the memory.

        Raises: LoadError, if nothing remains for it.
        """
        device, config = model.kernels.device, self._config
        device.free()
        if (memory := device.memory()) is None:
            return 0
        buffers = epoch_memory(model, assignment, limit, drafter.reads if drafter is not None else ())
        plan = MemoryPlan(
            memory, config.gpu_memory_utilization, model.num_bytes, buffers, config.kv_cache_memory_bytes
        )
        log.info("%s, KV cache %s", plan.describe(), size_text(plan.cache))
        return plan.cache

    @property
    def _device(self) -> str:
        """Kind of the device: "cuda" or "cpu".

        Raises: LoadError, if the wanted one is missing, or a setting does not fit it.
        """
        kind = device_kind(self._config.device)
        if kind == "cpu" and self._config.enforce_eager:
            raise LoadError(
                "--enforce-eager: --backend native records graphs on a GPU only; this worker computes on the CPU"
            )
        return kind

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
        return inputs_kept_together(self._quantization)

    def _digest(self, path: Path, checkpoint: Checkpoint) -> str:
        """Return the digest of the model and of settings that change its values: all ranks have the same."""
        quantization = self._config.quantization
        settings = [quantization] if quantization is not None else []
        settings += ["batch-invariant"] if self._config.batch_invariant else []
        return model_digest(path, checkpoint, settings)

    def _drafter_of(self, assignment: Assignment, model: Model, limit: int) -> Drafter | None:
        """Return the drafter: that of an earlier epoch with the same model, else read now."""
        if (speculation := assignment.speculation) is None:
            return None
        if not model.kernels.device.is_host and speculation.method != "ngram":
            raise LoadError(
                f'--speculative-config: a GPU computes no drafts of "method": "{speculation.method}" yet; use "ngram", '
                "or --device cpu"
            )
        wanted_for = speculation, model, assignment.block_size, limit
        if self._drafter is None or self._drafter_for != wanted_for:
            self._drafter = None  # freed before the next one is read
            path = checkpoint_path(self._config)
            target = TargetModel(
                speculation, model, path, open_checkpoint(path), assignment.block_size, limit
            )
            self._drafter, self._drafter_for = drafters.create(target), wanted_for
            self._drafter_contents = target.contents
        return self._drafter

    @torch.inference_mode()
    def init_kv_cache(self, init: InitializeCache) -> None:
        loaded = self._loaded.get()
        self._end_epoch()  # freed before the next one is allocated
        assignment, ranks = loaded.assignment, loaded.ranks
        epoch = NativeEpoch(loaded.model, ranks, loaded.drafter, assignment, init, self._poison)
        table = SlotTable(
            *(assignment.num_slots, assignment.block_size, init.num_blocks, init.max_model_len),
            leaves_rows_out=self.identify().leaves_rows_out,
        )
        stages = NativeStages(table, epoch, ranks, self._after_prepare)
        self._stages.set(stages)
        if taken := stages.capture(_log_progress):
            log.info("graphs of decode steps take %s", size_text(taken))

    def leave(self) -> None:
        self._end_epoch()
        self._ranks = None
        self._loaded.end()

    def _end_epoch(self) -> None:
        if (stages := self._stages.end()) is not None:
            stages.close()

    def abort(self) -> None:
        if (stages := self._stages.peek()) is not None:
            stages.abort()
        if (ranks := self._ranks) is not None:
            ranks.abort()

    def shutdown(self) -> None:
        self.leave()
        self._model = self._drafter = None

    # -- steps of an epoch ---------------------------------------------------------------------------------------

    def execute_model(self, step: SchedulerOutput) -> None:
        self._stages.get().execute(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> NativeOutput:
        """`grammar`: the masks of all constrained rows, for a caller that has them already."""
        return self._stages.get().sample(grammar)

    def add_masks(self, grammar: GrammarOutput) -> None:
        self._stages.get().add_masks(grammar)

    def release(self, slots: NDArray[np.int32]) -> None:
        self._stages.get().release(slots)


def _log_progress(done: int, whole: int) -> None:
    """Log each quarter of the sizes that are captured."""
    if done * 4 // whole > (done - 1) * 4 // whole:
        log.info("recording graphs of decode steps: %d of %d", done, whole)


def _dtype(worker: WorkerConfig, model: ModelConfig) -> torch.dtype:
    return torch.bfloat16 if served_dtype(worker, model) == "bfloat16" else torch.float32
