"""The native backend: one rank that computes with torch and its own kernels."""

import logging
import socket
from collections.abc import Callable
from typing import NamedTuple

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
from services.worker.backends.native.drafters.base import Drafter
from services.worker.backends.native.epoch import NativeEpoch
from services.worker.backends.native.epoch_memory import epoch_memory
from services.worker.backends.native.kept_model import WRITE_SECONDS, KeptModel
from services.worker.backends.native.model.layer_groups import LayerGroups
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.stages import NativeOutput, NativeStages
from services.worker.batch.slots import SlotTable
from services.worker.device.memory_plan import MemoryPlan
from services.worker.distributed.ranks import Ranks
from services.worker.kernels import selection
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.interface.kv_cache import Allocate, memory_of, own_memory
from services.worker.kernels.selection import KernelChoice
from services.worker.kv_memory import KVMemory
from services.worker.runner import Identity, Progress

log = logging.getLogger("runahead.worker")


class _Loaded(NamedTuple):
    """Result of `load`, until `leave`; the cache of an epoch is created from it."""

    assignment: Assignment
    ranks: Ranks
    model: Model
    drafter: Drafter | None
    """None on other ranks than the output rank, and without speculation."""
    max_model_len: int
    bytes_per_block: int
    groups: LayerGroups

    @property
    def content_identity(self) -> str:
        """Everything that the content of the caches depends on beside tokens and weights."""
        a, model = self.assignment, self.model
        sizes = self.max_model_len, self.bytes_per_block
        shape = model.cache_shape(a.block_size, self.groups)
        layout = "" if self.groups.is_plain else f" {self.groups}"
        return f"native {model.kernels.network.arithmetic} {shape} {a.shard} {a.speculation} {sizes}{layout}"


class NativeRunner:
    """A `ModelRunner` for checkpoints of `model/architectures`, in float32 or bfloat16, on the CPU or a GPU.

    Weights and, on the CPU, KV memory are kept from epoch to epoch. Everything else ends with the epoch. Steps are
    computed on a thread of their own (stages.py).

    Args:
        create_kernels: makes the chosen kernels, with their device
    """

    def __init__(
        self, config: WorkerConfig, create_kernels: Callable[[KernelChoice], Kernels] = selection.create
    ) -> None:
        self._config = config
        self._kept = KeptModel(config, create_kernels)
        self.kv_memory = KVMemory.kept(config.kv_keeper)
        self._ranks: Ranks | None = None
        """Set at the beginning of `load`, so that `abort` ends a join as well."""
        self._loaded = EpochValue[_Loaded]("load")
        self._stages = EpochValue[NativeStages]("init_kv_cache")

    @property
    def shard(self) -> Shard | None:
        return self._kept.shard

    @property
    def epoch(self) -> NativeEpoch:
        """The state of the epoch, when all launched steps are computed.

        Raises: RuntimeError, before `init_kv_cache` and after `leave`; the error of the step launched last.
        """
        return self._stages.get().computed_epoch

    # -- from process to epoch -----------------------------------------------------------------------------------

    def identify(self) -> Identity:
        return self._kept.identify()

    @torch.inference_mode()
    def load(self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None) -> Loaded:
        """Join the other ranks and read the weights. The number of threads is the user's, or this process's cores
        divided by the ranks on this machine."""
        self.leave()
        self._ranks = ranks = Ranks(assignment, listener)
        ranks.join()
        threads = self._config.threads or max(1, machine.cores() // ranks.on_this_machine)
        # One core stays free for the services that start at the same time. OpenMP's barriers would wait for it.
        torch.set_num_threads(max(1, threads - 1))
        model = self._kept.weights(assignment.shard, progress)
        whole = model.part.whole
        limit = context_limit(assignment.max_model_len, whole.max_position, whole.positions)
        drafter = self._kept.drafter(assignment, model, limit) if ranks.is_output else None
        torch.set_num_threads(threads)
        model.kernels.use_threads(threads)
        groups = LayerGroups.of(model.part, assignment.max_kv_groups, limit)
        bytes_per_block = model.bytes_per_block(assignment.block_size, groups)
        bytes_per_block += drafter.bytes_per_block if drafter is not None else 0
        loaded = _Loaded(assignment, ranks, model, drafter, limit, bytes_per_block, groups)
        self._loaded.set(loaded)
        identity = self.identify()
        self.kv_memory.content, kept = "", 0
        if model.kernels.device.is_host:
            self.kv_memory.content = f"{identity.model_hash} {identity.dtype} {loaded.content_identity}"
            kept = self.kv_memory.find(self._cache_identity(), assignment.block_size, len(groups.groups))
        return Loaded(
            model_hash=identity.model_hash,
            vocab_size=model.part.whole.vocab_size,
            max_model_len=limit,
            bytes_per_block=bytes_per_block,
            num_blocks=kept
            or num_kv_blocks(
                self._config,
                assignment,
                bytes_per_block,
                limit,
                budget=self._cache_budget(loaded),
                groups=groups.groups,
                ranks=ranks.on_this_machine,
            ),
            groups=() if groups.is_plain else groups.groups,
            hidden_size=model.part.whole.hidden_size,
            num_loads=self._kept.num_loads,
            contents=self._kept.contents(drafter),
            longrope="".join({rope.factors(limit) for rope in model.part.whole.ropes if rope}),
        )

    def _cache_identity(self) -> str:
        """Everything that the content and the size of the caches depend on beside tokens and free memory."""
        loaded, size = self._loaded.get(), self._config.kv_cache_memory_bytes
        contents = sorted(self._kept.contents(loaded.drafter).items())
        return f"{self.kv_memory.content} {loaded.assignment.num_slots} {size} {contents}"

    def _cache_budget(self, loaded: _Loaded) -> int:
        """Return the bytes for the KV cache on a device with memory of its own, else 0. Logs the account of the memory.

        Raises: LoadError, if nothing remains for it.
        """
        model, drafter, config = loaded.model, loaded.drafter, self._config
        device = model.kernels.device
        device.free()
        if (memory := device.memory()) is None:
            return 0
        reads = drafter.reads if drafter is not None else ()
        buffers = epoch_memory(model, loaded.assignment, loaded.max_model_len, reads, len(loaded.groups.groups))
        plan = MemoryPlan(memory, config.gpu_memory_utilization, model.num_bytes, buffers, config.kv_cache_memory_bytes)
        log.info("%s, KV cache %s", plan.describe(), size_text(plan.cache))
        return plan.cache

    @torch.inference_mode()
    def init_kv_cache(self, init: InitializeCache) -> None:
        loaded = self._loaded.get()
        self._end_epoch()  # freed before the next one is allocated
        assignment, ranks = loaded.assignment, loaded.ranks
        allocate: Allocate = own_memory
        num_blocks = init.num_blocks
        if self.kv_memory.content:
            sizes = assignment.block_size, num_blocks, loaded.bytes_per_block, len(loaded.groups.groups)
            num_blocks = self.kv_memory.begin(self._cache_identity(), *sizes)
            allocate = memory_of(self.kv_memory.take)
        epoch = NativeEpoch(
            *(loaded.model, ranks, loaded.drafter, assignment, init, num_blocks, allocate), loaded.groups
        )
        table = SlotTable(
            *(assignment.num_slots, assignment.block_size, init.num_blocks, init.max_model_len),
            leaves_rows_out=self.identify().leaves_rows_out and not init.whole_steps,
            count_rows=loaded.model.kernels.rows.count_rows,
            groups=loaded.groups.groups,
        )
        stages = NativeStages(table, epoch, ranks)
        self._stages.set(stages)
        if taken := stages.capture(_log_progress):
            log.info("graphs of decode steps take %s", size_text(taken))

    def leave(self) -> None:
        self._end_epoch()
        self._ranks = None
        self._loaded.end()

    def _end_epoch(self) -> None:
        if (stages := self._stages.end()) is not None and not stages.close():
            self.kv_memory.abandon()

    def abort(self) -> None:
        self.end_masks()
        if (ranks := self._ranks) is not None:
            ranks.abort()

    def shutdown(self) -> None:
        self.leave()
        self._kept.drop(WRITE_SECONDS)

    # -- steps of an epoch ---------------------------------------------------------------------------------------

    def execute_model(self, step: SchedulerOutput) -> None:
        self._stages.get().execute(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> NativeOutput:
        return self._stages.get().sample()

    def add_masks(self, grammar: GrammarOutput) -> None:
        self._stages.get().add_masks(grammar)

    def end_masks(self) -> None:
        if (stages := self._stages.peek()) is not None:
            stages.end_masks()

    def release(self, slots: NDArray[np.int32]) -> None:
        self._stages.get().release(slots)


def _log_progress(done: int, whole: int) -> None:
    """Log each quarter of the sizes that are captured."""
    if done * 4 // whole > (done - 1) * 4 // whole:
        log.info("recording graphs of decode steps: %d of %d", done, whole)
