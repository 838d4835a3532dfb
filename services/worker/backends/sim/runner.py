"""The simulator as a `ModelRunner`: it computes nothing, verifies everything, and takes modelled time."""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded, Shard
from protocol.steps import GrammarOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.epoch_value import EpochValue
from services.worker.backends.kv_blocks import affordable_blocks, context_limit
from services.worker.backends.sim.checkpoint import SimCheckpoint
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.epoch import LoadedRank, SimEpoch
from services.worker.backends.sim.model.hidden_states import HIDDEN_SIZE
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.kv_memory import KVMemory
from services.worker.runner import Identity, LoadError, Progress

if TYPE_CHECKING:
    from services.worker.backends.sim.ranks.group_exchange import GroupExchange

DEFAULT_BLOCKS = 16384
"""KV blocks without `kv_cache_memory_bytes`; a block costs its hashes only."""
HASH_BYTES = 8


class SimRunner:
    """A `ModelRunner` on a simulated asynchronous device.

    Args:
        make_device: another device, for tests.
        full_check: every row reads its whole context in every step; slow.
    """

    def __init__(
        self, config: WorkerConfig, make_device: Callable[[], SimDevice] = SimDevice, full_check: bool = False
    ) -> None:
        self._config = config
        self.kv_memory = KVMemory.kept(config.kv_keeper)
        self._make_device, self._full_check = make_device, full_check
        self.shard: Shard | None = None
        self.exchange: GroupExchange | None = None
        """With the other ranks; None: there is none."""
        self._rank = EpochValue[LoadedRank]("load")
        self._epoch = EpochValue[SimEpoch]("init_kv_cache")

    @property
    def epoch(self) -> SimEpoch:
        """The state of the present epoch. Raises: RuntimeError, outside of an epoch."""
        return self._epoch.get()

    def identify(self) -> Identity:
        digest = SimCheckpoint.from_config(self._config).digest
        # The shapes of a rigid device have no room for rows that come again
        leaves_rows_out = not self._config.sim_rigid
        return Identity(digest, "float32", (1, 2, 4, 8, 16, 32), 64, leaves_rows_out=leaves_rows_out)

    def load(self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None) -> Loaded:
        config = self._config
        if assignment.speculation and config.sim_rigid:
            raise LoadError("a rigid device has no room for drafts: speculate without --sim-rigid")
        checkpoint = SimCheckpoint.from_config(config)
        limit = context_limit(assignment.max_model_len, checkpoint.max_model_len)
        bytes_per_block = assignment.block_size * HASH_BYTES
        if config.kv_cache_memory_bytes:
            blocks = affordable_blocks(config.kv_cache_memory_bytes, bytes_per_block)
        else:
            blocks = max(DEFAULT_BLOCKS, -(-limit // assignment.block_size) + 1)
        blocks = self.kv_memory.find(_identity(config, assignment, checkpoint), assignment.block_size) or blocks
        shard = assignment.shard
        self.kv_memory.content = f"sim {checkpoint.digest} {shard} {assignment.block_size}"
        cost = CostModel(config, shard.pipeline_parallel_size)
        self._join(assignment, cost, listener)
        self._rank.set(LoadedRank(config, assignment, checkpoint, cost, self.exchange))
        self.shard = shard
        progress("simulated model", 1.0)
        return Loaded(
            model_hash=checkpoint.digest,
            vocab_size=checkpoint.vocab_size,
            max_model_len=limit,
            bytes_per_block=bytes_per_block,
            num_blocks=blocks,
            simulated=True,
            hidden_size=HIDDEN_SIZE,
        )

    def _join(self, assignment: Assignment, cost: CostModel, listener: socket.socket | None) -> None:
        """Connect this rank with the others. Raises: RanksLost"""
        if assignment.world_size == 1:
            self.exchange = None
            if listener is not None:
                listener.close()
            return
        # torch takes seconds to import, and a single rank does not need it
        from services.worker.backends.sim.ranks.group_exchange import GroupExchange
        from services.worker.distributed.ranks import Ranks

        ranks = Ranks(assignment, listener)
        self.exchange = GroupExchange(ranks, cost, assignment.num_slots)
        ranks.join()

    def init_kv_cache(self, init: InitializeCache) -> None:
        self._end_epoch()
        rank = self._rank.get()
        assignment, identity = rank.assignment, _identity(self._config, rank.assignment, rank.checkpoint)
        bytes_per_block = assignment.block_size * HASH_BYTES
        num_blocks = self.kv_memory.begin(identity, assignment.block_size, init.num_blocks, bytes_per_block)
        kv = np.frombuffer(self.kv_memory.take(num_blocks * bytes_per_block), np.uint64)
        kv = kv[: init.num_blocks * assignment.block_size]
        self._epoch.set(SimEpoch(rank, init, self._make_device(), self._full_check, kv))

    def execute_model(self, step: SchedulerOutput) -> None:
        self.epoch.execute(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepOutput:
        return self.epoch.sample()

    def add_masks(self, grammar: GrammarOutput) -> None:
        self.epoch.add_masks(grammar)

    def end_masks(self) -> None:
        if (epoch := self._epoch.peek()) is not None:
            epoch.end_masks()

    def release(self, slots: NDArray[np.int32]) -> None:
        self.epoch.table.release(slots)

    def leave(self) -> None:
        self._end_epoch()
        self._rank.end()
        self.exchange = None

    def _end_epoch(self) -> None:
        epoch = self._epoch.end()
        if epoch is not None:
            epoch.close()

    def abort(self) -> None:
        self.end_masks()
        if (exchange := self.exchange) is not None:
            exchange.ranks.abort()

    def shutdown(self) -> None:
        self.leave()


def _identity(config: WorkerConfig, assignment: Assignment, checkpoint: SimCheckpoint) -> str:
    """Return what the content of the cache depends on beside tokens, and its size on limits."""
    sizes = assignment.block_size, assignment.num_slots, assignment.max_model_len, config.kv_cache_memory_bytes
    return f"sim {checkpoint.digest} {assignment.shard} {sizes} {assignment.speculation}"
