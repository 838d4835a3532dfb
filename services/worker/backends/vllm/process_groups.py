"""The process groups of one epoch: one that this module forms, from which vLLM forms its own.

vLLM uses the default group of torch.distributed if there is one. So the ranks meet at the socket that rank 0 registered
with, and wait for one another no longer than on other backends. While vLLM forms its groups, its ranks exchange pickled
objects, so all ranks must be trusted, as torch's own transport also requires.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from protocol.membership import Assignment
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.shared_memory import VllmSharedMemory, sweep_shared_memory
from services.worker.distributed.messages import STEP_TIMEOUT, MessageWaiter, one_line
from services.worker.distributed.pipeline import PipelineGroup
from services.worker.distributed.ranks import connect, count_on_this_machine, meet, shut_down, sockets
from services.worker.distributed.rendezvous import local_address
from services.worker.runner import RanksLost

_c10d: Any = distributed  # its stubs lack most of what is used here


class ProcessGroups:
    """Connections of this rank to the other ranks. Methods that wait for these raise RanksLost.

    Args:
        listener: this worker's own listening socket. Rank 0 serves the store on it; every rank closes it.
    """

    def __init__(self, assignment: Assignment, listener: socket.socket | None) -> None:
        self._assignment, self._listener = assignment, listener
        self._other_sockets = sockets()
        """Sockets of this process that belong to something else."""
        self._aborted = False
        self._waiter = MessageWaiter()
        self.pipeline = PipelineGroup()
        """The stages of this rank, which do not use vLLM's own group. Set by `join`."""
        self._memory = VllmSharedMemory()
        self.ranks_on_machine = 1
        """Ranks that share this machine's cores, including this one. Set by `join`."""

    @property
    def has_several_ranks(self) -> bool:
        return self._assignment.world_size > 1

    def join(self) -> str:
        """Connect this rank with the others. Returns vLLM's `distributed_init_method`.

        vLLM lets ranks share memory if the last part of this name is equal: ranks on the same machine.

        Raises: RanksLost, if the other ranks do not come in time.
        """
        assignment = self._assignment
        with self.detect_lost_ranks():
            try:
                sweep_shared_memory()
                store = _c10d.HashStore()
                if self.has_several_ranks:
                    store = meet(assignment, self._listener, lambda: self._aborted)
                self.ranks_on_machine = count_on_this_machine(store, assignment)
                _c10d.init_process_group(
                    "gloo", store=store, rank=assignment.rank, world_size=assignment.world_size, timeout=STEP_TIMEOUT
                )
                shard, host = assignment.shard, assignment.rendezvous.rpartition(":")[0]
                if (stages := shard.pipeline_parallel_size) > 1:
                    address, column = local_address(host), f"pp{shard.tp_rank}"
                    peers = connect(store, column, shard.pp_rank, stages, address, self._waiter)
                    self.pipeline = PipelineGroup(peers)
                name = self._memory.agree(store, assignment.rank) if self.has_several_ranks else "alone"
            finally:
                if self._listener is not None:
                    self._listener.close()
        return f"tcp://{assignment.rendezvous}:{name}"

    def unlink_shared_memory(self) -> None:
        """Remove the names of the shared memory. Call when vLLM has formed its groups."""
        if self.has_several_ranks:
            with self.detect_lost_ranks():
                self._memory.unlink(_c10d.barrier)

    def broadcast(self, numbers: NDArray[np.int32]) -> None:
        """Replace the numbers of every rank of the last stage by those of the output rank. All of them call it with as
        many."""
        if self._assignment.tensor_parallel_size > 1:
            coordinator = vllm_api.get_tp_group()
            with self.detect_lost_ranks():
                _c10d.broadcast(torch.from_numpy(numbers), self._assignment.output_rank, coordinator.cpu_group)

    def agree(self, each: list[bool]) -> list[bool]:
        """Return where all ranks have True. All of them call it with as many."""
        numbers = torch.tensor(each, dtype=torch.int32)
        if self.has_several_ranks:
            with self.detect_lost_ranks():
                _c10d.all_reduce(numbers, _c10d.ReduceOp.MIN)
        return numbers.bool().tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each stage."""
        values = [value] * self.pipeline.size
        if self.pipeline.size > 1:
            coordinator = vllm_api.get_pp_group()
            with self.detect_lost_ranks():
                _c10d.all_gather_object(values, value, coordinator.cpu_group)
        return values

    @contextmanager
    def detect_lost_ranks(self) -> Iterator[None]:
        """Raises: RanksLost, if the enclosed code fails because another rank is lost or `abort` was called."""
        try:
            yield
        except RuntimeError as error:
            if not self.has_several_ranks or not (
                self._aborted or isinstance(error, _c10d.DistError) or "gloo" in str(error)
            ):
                raise
            raise RanksLost(f"rank {self._assignment.rank} cannot reach the others: {one_line(error)}") from error

    def abort(self) -> None:
        """End a wait for other ranks with RanksLost; on any thread. A wait in vLLM's shared memory does not end."""
        self._aborted = True
        self._waiter.abort()
        if self.has_several_ranks:
            shut_down(sockets() - self._other_sockets)

    def leave(self) -> None:
        """Destroy the groups without waiting for other ranks. The process may end afterwards."""
        with suppress(RuntimeError):
            vllm_api.destroy_model_parallel()
            vllm_api.destroy_distributed_environment()
        # Ranks share memory if vLLM has numbered their groups alike, and a new worker starts at 0.
        vllm_api.group_name_counter.clear()
        self._memory.remove_names()

    def free_shared_memory(self) -> None:
        """Free the memory that this rank has shared. Call after `leave`, when the epoch has ended for all ranks."""
        self._memory.free()
