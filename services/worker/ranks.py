"""How the ranks of one epoch reach one another: process groups over torch.distributed, gloo on the CPU, NCCL on CUDA.

Nothing here is global: an epoch has its own store and groups, and the next one starts from nothing. Sums over ranks are
made in the order of ranks, so that a row's result does not depend on the batch it is in.
"""

import os
import socket
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from protocol.membership import Assignment
from services.worker.rendezvous import local_address
from services.worker.runner import RanksLost

JOIN_TIMEOUT = timedelta(seconds=60)
"""For the ranks to find one another."""
STEP_TIMEOUT = timedelta(minutes=30)
"""The last resort: the scheduler's own deadline is shorter and ends in `abort`."""
_c10d: Any = distributed  # its stubs lack most of what is used here
ACTIVATIONS, FEEDBACK = 0, 1
"""Tags of what stages send: onwards, and from the last to the first."""


class Team:
    """The tensor-parallel ranks of one stage; every one of them calls the same methods in the same order."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`x` of every rank, in the order of ranks; equal shapes and dtypes.

        Raises: RanksLost
        """
        if self._group is None:
            return [x]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _wait(self._group.allgather([parts], [x]))
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, with the same bits on each.

        Raises: RanksLost
        """
        if self._group is None:
            return x
        if x.is_cuda:
            _wait(self._group.allreduce([x]))
            return x
        first, *others = self.all_gather(x)
        for part in others:
            first += part
        return first

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's `x`, written into everyone's.

        Raises: RanksLost
        """
        if self._group is not None:
            _wait(self._group.broadcast([x], 0))
        return x


class Stages:
    """The pipeline stages that this rank's column of the group goes through: one rank of each, with equal `tp_rank`.

    Sender and receiver must agree from the plan alone what is sent, and of which shape (spec 3(b) 10).
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group, self.rank, self.size = group, rank, size
        self._leaving: deque[tuple[torch.Tensor, distributed.Work]] = deque()
        """What is on its way, kept until it has left."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def send_next(self, *tensors: torch.Tensor) -> None:
        """Hands activations to the next stage without waiting for it. They must not change any more.

        Raises: RanksLost
        """
        for tensor in tensors:
            self._send(tensor, self.rank + 1, ACTIVATIONS)

    def receive_previous(self, *tensors: torch.Tensor) -> None:
        """Fills `tensors` with what the stage before sends next.

        Raises: RanksLost
        """
        for tensor in tensors:
            self._receive(tensor, self.rank - 1, ACTIVATIONS)

    def send_first(self, tensor: torch.Tensor) -> None:
        """From the last stage back to the first, without waiting for it.

        Raises: RanksLost
        """
        self._send(tensor, 0, FEEDBACK)

    def receive_last(self, tensor: torch.Tensor) -> None:
        """Fills `tensor` with what the last stage sends next.

        Raises: RanksLost
        """
        self._receive(tensor, self.size - 1, FEEDBACK)

    def _send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        if self._group is None:
            raise RuntimeError("a group of one stage sends nothing")
        while self._leaving and self._leaving[0][1].is_completed():
            _wait(self._leaving.popleft()[1])
        tensor = tensor.contiguous()
        try:
            self._leaving.append((tensor, self._group.send([tensor], to, tag)))
        except RuntimeError as error:
            raise RanksLost(str(error)) from error

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        if self._group is None:
            raise RuntimeError("a group of one stage receives nothing")
        try:
            work = self._group.recv([tensor], source, tag)
        except RuntimeError as error:
            raise RanksLost(str(error)) from error
        _wait(work)


def _wait(work: distributed.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RanksLost(str(error)) from error


class Ranks:
    """All groups of this rank in one epoch.

    Args:
        listener: this worker's own listening socket; rank 0 serves the store on it, every rank gives it up.
        device: "cpu" or "cuda".

    Raises: RanksLost, when the others do not come.
    """

    def __init__(
        self, assignment: Assignment, listener: socket.socket | None = None, device: str = "cpu"
    ) -> None:
        self.assignment, self.shard = assignment, assignment.shard
        self._sockets: set[str] = set()
        shard, before = self.shard, _sockets()
        columns = shard.tensor_parallel_size, shard.pipeline_parallel_size
        self.team, self.stages = Team(None, 0, 1), Stages(None, 0, 1)
        try:
            if assignment.world_size > 1:
                self._join(assignment, listener, device)
        except RuntimeError as error:
            raise RanksLost(f"rank {assignment.rank} cannot reach the others: {error}") from error
        finally:
            if listener is not None:
                listener.close()
        self._sockets = _sockets() - before
        if (self.team.size, self.stages.size) != columns:
            raise AssertionError("groups and shard differ")

    @property
    def is_output(self) -> bool:
        """Whether this rank samples and reports results."""
        return self.assignment.rank == self.assignment.output_rank

    def _join(self, assignment: Assignment, listener: socket.socket | None, device: str) -> None:
        host, _, port = assignment.rendezvous.rpartition(":")
        is_first, fd = assignment.rank == 0, None
        if is_first:
            if listener is None:
                raise ValueError("rank 0 needs the socket it registered with")
            fd = listener.detach()
        self._store = _c10d.TCPStore(
            host, int(port), assignment.world_size, is_first, JOIN_TIMEOUT,
            wait_for_workers=False, master_listen_fd=fd,
        )  # fmt: skip
        shard, tp, pp = self.shard, assignment.tensor_parallel_size, assignment.pipeline_parallel_size
        address = local_address(host)
        if tp > 1:
            group = self._group(f"tp{shard.pp_rank}", shard.tp_rank, tp, device, address)
            self.team = Team(group, shard.tp_rank, tp)
        if pp > 1:
            group = self._group(f"pp{shard.tp_rank}", shard.pp_rank, pp, device, address)
            self.stages = Stages(group, shard.pp_rank, pp)

    def _group(self, name: str, rank: int, size: int, device: str, address: str) -> Any:
        store = _c10d.PrefixStore(name, self._store)
        if device == "cuda":
            nccl = _c10d.ProcessGroupNCCL.Options()
            return _c10d.ProcessGroupNCCL(store, rank, size, nccl)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = STEP_TIMEOUT
        return _c10d.ProcessGroupGloo(store, rank, size, options)

    def abort(self) -> None:
        """From any thread: whoever waits in one of these groups gets RanksLost.

        gloo knows no way to interrupt a wait but a closed connection, so the connections are shut down under it.
        """
        for name in self._sockets & _sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(int(name.partition(" ")[0]))) as connection:
                connection.getpeername()  # listening sockets stay: gloo ends the process when one fails
                connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> set[str]:
    """Open sockets of this process, as "FD INODE"."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                found.add(f"{fd} {target}")
    return found
