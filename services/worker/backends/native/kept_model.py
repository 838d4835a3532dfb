"""The model of a worker process: its identity, and weights and drafter, which are kept from epoch to epoch."""

import logging
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch

from protocol.membership import Assignment, Shard
from services.config import WorkerConfig
from services.private import user_cache
from services.worker.backends.native import drafters
from services.worker.backends.native.drafters.base import Drafter, TargetModel
from services.worker.backends.native.memory import served_dtype
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.loading import has_blocks
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart, tensor_parallel_sizes
from services.worker.device.choice import device_kind
from services.worker.kernels import selection
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.layout import inputs_kept_together
from services.worker.kernels.quantized_weight import Quantization
from services.worker.kernels.selection import KernelChoice
from services.worker.runner import SINGLE_GPU, Identity, LoadError, Progress
from services.worker.weights import (
    Checkpoint,
    Contents,
    HashedCheckpoint,
    checkpoint_path,
    model_digest,
    open_checkpoint,
    tokenizer_digest,
)
from services.worker.weights.contents import known_contents
from services.worker.weights.packed import PackedFile, PackedWeights
from services.worker.weights.sources import packing_digest, source_identity

log = logging.getLogger("runahead.worker")

WORTH_A_FILE = 256 << 20
"""Bytes of packed weights from which on they are kept by default: smaller ones are made in less than a second."""
WRITE_SECONDS = 8.0
"""Seconds that a worker that leaves waits for its file of packed weights. Otherwise one that always runs shorter than
the file takes to be written would pack at each start."""


class KeptModel:
    """
    Args:
        create_kernels: makes the chosen kernels, with their device
    """

    def __init__(self, config: WorkerConfig, create_kernels: Callable[[KernelChoice], Kernels]) -> None:
        self._config, self._create_kernels = config, create_kernels
        self._identity: Identity | None = None
        self._model: Model | None = None
        self._contents: Contents = {}
        self._drafter: Drafter | None = None
        self._drafter_for: tuple[object, ...] = ()
        self._drafter_contents: Contents = {}
        self._packed_file: PackedFile | None = None
        """Writes the packed weights that were made in the last read."""
        self.num_loads = 0
        """Number of times that weights were read."""

    @property
    def shard(self) -> Shard | None:
        """Whose weights are in memory."""
        return None if self._model is None else self._model.part.shard

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
                model_hash=self._digest(path, config, open_checkpoint(path)),
                dtype=str(_dtype(self._config, config)).removeprefix("torch."),
                tensor_parallel_sizes=sizes,
                max_pipeline_parallel_size=stages,
                tokenizer=tokenizer_digest(path),
                leaves_rows_out=self._device == "cpu",  # the end of a forward pass on a GPU is not observed
                single_rank=single,
            )
        return self._identity

    def weights(self, shard: Shard, progress: Progress) -> Model:
        """Return the weights: those of an earlier epoch, if the shard is the same, else read now.

        Raises: LoadError
        """
        if self._model is None or self.shard != shard:
            self.drop()  # before the next ones are read
            self.num_loads += 1
            self._model, self._contents = self._read(shard, progress)
        return self._model

    def _read(self, shard: Shard, progress: Progress) -> tuple[Model, Contents]:
        path = checkpoint_path(self._config)
        config, checkpoint = ModelConfig.from_checkpoint(path), open_checkpoint(path)
        if self._digest(path, config, checkpoint) != self.identify().model_hash:
            raise LoadError(f"the files of {path} have changed; start this worker again")
        choice = self._choose_kernels(config, checkpoint, self._config.performance_mode)
        log.info("%s", choice.describe(selection.device_features(self._device)))
        file, packed, source = self._file_of(path, shard, choice), PackedWeights(), source_identity(path)
        if file is not None:
            packed = file.read(progress)
        part = ModelPart.from_shard(config, shard, self._group)
        hashed = HashedCheckpoint(checkpoint, contents=known_contents(packed.contents))
        progress("preparing compiled kernels", 0.0)
        kernels, threads = self._create_kernels(choice), torch.get_num_threads()
        kernels.use_threads(threads)
        torch.set_num_threads(threads)  # both kinds of threads re-order weights
        model = Model(part, hashed, choice.dtype, kernels, progress, self._quantization, packed)
        if file is not None:
            file.keep(packed, hashed.contents, lambda: source_identity(path) == source)
            self._packed_file = file
        log.info("weights: %.1f MiB in %s", model.num_bytes / 2**20, model.weight_types)
        return model, hashed.contents

    def _choose_kernels(self, model: ModelConfig, checkpoint: Checkpoint, mode: str) -> KernelChoice:
        c, quantization = self._config, self._quantization
        quantized = quantization != "none" and (quantization is not None or has_blocks(checkpoint, model))
        return selection.choose(
            *(c.kernels, self._device, _dtype(c, model), selection.device_features(self._device)),
            *(quantized, c.batch_invariant, c.enforce_eager, mode != "throughput"),
        )

    def drafter(self, assignment: Assignment, model: Model, limit: int) -> Drafter | None:
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
            target = TargetModel(speculation, model, path, open_checkpoint(path), assignment.block_size, limit)
            self._drafter, self._drafter_for = drafters.create(target), wanted_for
            self._drafter_contents = target.contents
        return self._drafter

    def contents(self, drafter: Drafter | None) -> dict[str, str]:
        """Return the digest of each part of the weights, with those of the drafter."""
        parts = self._contents if drafter is None else self._contents | self._drafter_contents
        return {part: digest.result() for part, digest in parts.items()}

    def drop(self, patience: float = 0.0) -> None:
        """Free the memory, also that of the drafter, which is for this model only.

        Args:
            patience: seconds for packed weights that are not written yet.
        """
        self._model = self._drafter = None
        self._drafter_for = ()  # it has the model
        if self._packed_file is not None:
            self._packed_file.end(patience)
            self._packed_file = None

    def _file_of(self, path: Path, shard: Shard, choice: KernelChoice) -> PackedFile | None:
        """Return the file of packed weights. None: there is none for this device, or the user wants none."""
        wanted = self._config.weights_cache_dir
        if wanted == "none" or choice.device != "cpu" or choice.implementation != "compiled":
            return None
        is_default = wanted == "auto"
        directory = user_cache() / "weights" if is_default else Path(os.path.expanduser(wanted))
        settings = f"{shard} {choice} {self._config.quantization}"
        digest = sha256(f"{path.resolve()} {settings}".encode()).hexdigest()[:16]
        identity = f"{self.identify().model_hash} {source_identity(path)} {packing_digest()} {settings}"
        limits = self._config.weights_cache_bytes, WORTH_A_FILE if is_default else 0
        return PackedFile(directory, f"{path.stem}-{digest}", identity, *limits)

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

    def _digest(self, path: Path, model: ModelConfig, checkpoint: Checkpoint) -> str:
        """Return the digest of the model and of settings that change its values: all ranks have the same."""
        c = self._config
        settings = [c.quantization] if c.quantization is not None else []
        settings += ["batch-invariant"] if c.batch_invariant else []
        if c.performance_mode == "throughput":  # on many devices, and without quantised weights, it changes nothing
            chosen, other = (self._choose_kernels(model, checkpoint, mode) for mode in ("throughput", "balanced"))
            settings += ["throughput"] if chosen != other else []
        return model_digest(path, checkpoint, settings)


def _dtype(worker: WorkerConfig, model: ModelConfig) -> torch.dtype:
    return torch.bfloat16 if served_dtype(worker, model) == "bfloat16" else torch.float32
