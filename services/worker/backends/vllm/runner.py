"""The vLLM backend: vLLM's own worker of one rank executes the scheduler's plans.

On the CPU, vLLM's call returns when the step is computed, and vLLM stores the tokens that it sampled. So a step that
was planned ahead finds them there at any depth, and vLLM receives the tokens of a request once. On a GPU the call
enqueues the step, and the tokens stay on the device for the next one (sampled_steps.py).
"""

import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.kv_groups import ONE_GROUP
from protocol.membership import Assignment, InitializeCache, Loaded, Shard
from protocol.steps import GrammarOutput, SchedulerOutput
from services.checkpoint import is_gguf
from services.config import WorkerConfig
from services.worker import machine
from services.worker.backends.epoch_value import EpochValue
from services.worker.backends.kv_blocks import num_kv_blocks
from services.worker.backends.vllm.adapters import adapted_modules
from services.worker.backends.vllm.checkpoint import read_identity
from services.worker.backends.vllm.engine import VllmEngine
from services.worker.backends.vllm.engine_config import EngineOptions
from services.worker.backends.vllm.epoch import VllmEpoch
from services.worker.backends.vllm.plan import RESERVED_BLOCKS
from services.worker.backends.vllm.platforms.choice import worker_platform
from services.worker.backends.vllm.platforms.interface import WorkerPlatform
from services.worker.backends.vllm.process_groups import ProcessGroups
from services.worker.batch.slots import SlotTable
from services.worker.kv_memory import KVMemory
from services.worker.runner import Identity, LoadError, Output, Progress
from services.worker.weights import checkpoint_path, drafter_path, layer_contents
from services.worker.weights.conversion import cached_conversion
from services.worker.weights.safetensors_checkpoint import SafetensorsCheckpoint


class VllmRunner:
    """A `ModelRunner` for models of vLLM.

    Args:
        create_platform: returns the device, when a model is loaded
    """

    def __init__(
        self, config: WorkerConfig, create_platform: Callable[[WorkerConfig], WorkerPlatform] = worker_platform
    ) -> None:
        self._config, self._create_platform = config, create_platform
        self.kv_memory = KVMemory()  # vLLM allocates its own, for each epoch
        self.shard: Shard | None = None
        self._identity: Identity | None = None
        self._engine: VllmEngine | None = None
        self._groups: ProcessGroups | None = None
        self._assignment = EpochValue[Assignment]("load")
        self._contents: dict[str, str] = {}
        """Digest of each layer of the weights in memory."""
        self._names: tuple[str, ...] = ()
        """Names of the weights in the checkpoint."""
        self._num_loads = 0
        """Number of times that weights were read."""
        self._epoch = EpochValue[VllmEpoch]("init_kv_cache")

    def identify(self) -> Identity:
        """Return the properties of the checkpoint, read at the first call: those of the weights in memory."""
        if self._identity is None:
            self._identity = read_identity(_directory(self._config), self._config)
        return self._identity

    def load(self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None) -> Loaded:
        """Load the weights. A single rank keeps them from epoch to epoch. Several ranks read them again, because vLLM's
        layers keep references to their process groups."""
        self._assignment.set(assignment)
        digest, options = self.identify().model_hash, self._options(assignment)
        if self._engine is None or self._engine.options != options:
            self._close()
            self.shard = None
            progress("weights", 0.0)
            self._num_loads += 1
            platform = self._create_platform(self._config)
            self._contents, self._names = self._read_checkpoint(options)
            self._groups = ProcessGroups(assignment, listener)
            with self._groups.detect_lost_ranks():
                self._engine = VllmEngine(options, self._groups, platform)
            self.shard = assignment.shard
        elif listener is not None:
            listener.close()
        progress("weights", 1.0)
        engine = self._engine
        return Loaded(
            model_hash=digest,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len + (engine.pooler is not None),
            bytes_per_block=engine.bytes_per_block,
            num_blocks=num_kv_blocks(
                self._config,
                assignment,
                engine.bytes_per_block,
                engine.max_model_len,
                RESERVED_BLOCKS,
                engine.cache_budget,
                engine.groups,
                self._groups.ranks_on_machine if self._groups is not None else 1,
            ),
            groups=() if engine.groups == ONE_GROUP else engine.groups,
            hidden_size=engine.hidden_size,
            num_loads=self._num_loads,
            contents=self._contents,
            pooling=None if engine.pooler is None else engine.pooler.model,
            media=engine.media,
            adapted_modules=adapted_modules(engine.runner.lora_manager, self._names) if assignment.max_loras else (),
            longrope=engine.longrope,
        )

    def _read_checkpoint(self, options: EngineOptions) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the digests of all layers, and the names of the weights. vLLM reads all files on every rank, and then
        keeps the rank's share."""
        if self._config.load_format == "dummy":  # vLLM makes up the weights
            return {}, ()
        checkpoint, threads = SafetensorsCheckpoint(options.directory), self._config.threads or machine.cores()
        contents = layer_contents(checkpoint, threads)
        if (speculation := options.assignment.speculation) and speculation.model:
            digests = layer_contents(SafetensorsCheckpoint(drafter_path(speculation)), threads)
            contents |= {f"drafter/{layer}": digest for layer, digest in digests.items()}
        return contents, (*checkpoint.files,)

    def _options(self, assignment: Assignment) -> EngineOptions:
        directory = _directory(self._config)
        if read_identity(directory, self._config) != self.identify():
            raise LoadError(f"the files in {directory} have changed; start this worker again")
        return EngineOptions(directory, self.identify().dtype, self._config, replace(assignment, epoch=0))

    def init_kv_cache(self, init: InitializeCache) -> None:
        engine, groups = self._parts()
        leaves_rows_out = self.identify().leaves_rows_out and not init.whole_steps
        self._epoch.set(VllmEpoch(engine, groups, self._assignment.get(), init, leaves_rows_out))

    @property
    def engine(self) -> VllmEngine:
        """Raises: RuntimeError, if no model is loaded."""
        return self._parts()[0]

    @property
    def table(self) -> SlotTable:
        """Columns of the slots. Raises: RuntimeError, outside of an epoch."""
        return self._epoch.get().table

    def _parts(self) -> tuple[VllmEngine, ProcessGroups]:
        if self._engine is None or self._groups is None:
            raise RuntimeError("no model is loaded in this epoch")
        return self._engine, self._groups

    def execute_model(self, step: SchedulerOutput) -> None:
        self._epoch.get().execute(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        return self._epoch.get().sample(grammar)

    def add_masks(self, grammar: GrammarOutput) -> None:
        raise RuntimeError("vLLM's runner samples a step at once, with the masks that it is given then")

    def end_masks(self) -> None:
        """Do nothing: no step waits for masks here."""

    def release(self, slots: NDArray[np.int32]) -> None:
        self._epoch.get().release(slots)

    def leave(self) -> None:
        self._epoch.end()
        self._assignment.end()
        if (groups := self._groups) is not None and groups.has_several_ranks:
            self._close()
            groups.free_shared_memory()
        elif self._engine is not None:
            self._engine.drop_cache()

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
        self._epoch.end()
        self._close()


def _directory(config: WorkerConfig) -> Path:
    """Return the model's directory; a GGUF file is converted once, because vLLM reads none. Raises: LoadError

    With `--dtype float32` the file's weights are converted to float32, which loses nothing.
    """
    path = checkpoint_path(config)
    return cached_conversion(path, config.dtype) if is_gguf(path) else path
