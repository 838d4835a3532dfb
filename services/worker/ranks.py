"""How the ranks of one epoch reach one another: process groups over torch.distributed, gloo on the CPU.

Nothing here is global: an epoch has its own store and groups, and the next one starts from nothing. Sums over ranks are
made in the order of ranks, so that a row's result does not depend on the batch it is in.

There is no other transport yet: groups on CUDA devices (NCCL) are refused by name.
"""

import os
import queue
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import distributed

from protocol.membership import Assignment
from services.worker.rendezvous import local_address
from services.worker.runner import RanksLost
from services.worker.staging import MAX_STEPS_IN_FLIGHT

JOIN_TIMEOUT = timedelta(seconds=60)
"""For the ranks to find one another."""
ATTEMPT = timedelta(seconds=5)
"""For one attempt to reach the first rank. An epoch that ends while its ranks join leaves a thread for that long."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Equal for all processes of a machine, in whichever container, and for no others."""
STEP_TIMEOUT = timedelta(minutes=30)
"""The last resort: the scheduler's own deadline is shorter and ends in `abort`."""
_c10d: Any = distributed  # its stubs lack most of what is used here
ACTIVATIONS, FEEDBACK, TEAM = 0, 1, 2
"""Tags of what stages send onwards, of what the last sends to the first, and of what a team exchanges."""
SMALL = 1 << 16
"""Bytes that a connection gives at once. Who waits for as little to arrive can wait on its own thread, two switches
faster, and layers do that twice: until it begins to arrive it fails with its connection."""
AHEAD = 4
"""Steps that a stage computes before the next stage takes the first of them: as many activations are kept."""


_Works = Sequence[distributed.Work]


class _Waiter:
    """Waits for messages on a thread of its own, so that `abort` frees whoever needs them, always.

    A closed connection is not enough: a message that is half on its way when its connection breaks is neither completed
    nor failed by gloo, and no later call ends that wait.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[_Works | None] = queue.SimpleQueue()
        self._outcome: queue.SimpleQueue[RuntimeError | RanksLost | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        arguments = self._works, self._outcome
        threading.Thread(target=_serve, args=arguments, name="messages", daemon=True).start()
        weakref.finalize(self, self._works.put, None)

    def wait(self, *works: distributed.Work) -> None:
        """Raises: RanksLost"""
        if self._aborted.is_set():
            raise RanksLost("the epoch has ended")
        self._works.put(works)
        _raise(self._outcome.get())

    def abort(self) -> None:
        """From any thread. From now on nothing can be waited for."""
        self._aborted.set()
        self._outcome.put(RanksLost("the epoch ended while ranks waited for one another"))


def _serve(works: "queue.SimpleQueue[_Works | None]", outcome: "queue.SimpleQueue[Any]") -> None:
    while (some := works.get()) is not None:
        error = _failure(some)
        del some  # it keeps tensors
        outcome.put(error)


def _raise(error: RuntimeError | RanksLost | None) -> None:
    if error is not None:
        raise RanksLost(str(error)) from error


def _failure(works: _Works) -> RuntimeError | None:
    try:
        for work in works:
            work.wait(STEP_TIMEOUT)  # the group's own timeout is that of joining
    except RuntimeError as error:
        return error
    return None


class _Peers:
    """Messages between the ranks of one group. All of gloo's collectives would do, but its plain messages leave on the
    calling thread: with few ranks they take a third of the time. They arrive in order per sender and tag."""

    def __init__(self, group: Any, rank: int, size: int, waiter: _Waiter) -> None:
        self._group, self.rank, self.wait = group, rank, waiter.wait
        self.others = [other for other in range(size) if other != rank]

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> distributed.Work:
        """`tensor` is contiguous and must not change until it has left. Raises: RanksLost"""
        try:
            return self._group.send([tensor], to, tag)
        except RuntimeError as error:
            raise RanksLost(str(error)) from error

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> distributed.Work:
        """Raises: RanksLost"""
        try:
            return self._group.recv([tensor], source, tag)
        except RuntimeError as error:
            raise RanksLost(str(error)) from error


class Team:
    """The tensor-parallel ranks of one stage; every one of them calls the same methods in the same order."""

    def __init__(self, peers: _Peers | None = None) -> None:
        self._peers = peers
        self.rank, self.size = (peers.rank, len(peers.others) + 1) if peers else (0, 1)
        self._leaving: tuple[torch.Tensor, list[distributed.Work]] | None = None
        """What was sent in the last `all_gather`: it has arrived by the time that the next one's has, from the same."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`x` of every rank, in the order of ranks, its own not copied; equal shapes and dtypes. `x` must not change
        before the next call has returned.

        Raises: RanksLost
        """
        if self._peers is None:
            return [x]
        x, peers = x.contiguous(), self._peers
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        sent = [peers.send(x, rank, TEAM) for rank in peers.others]
        received = [peers.receive(parts[rank], rank, TEAM) for rank in peers.others]
        if x.nbytes > SMALL:
            peers.wait(*received, *sent)
        else:
            _raise(_failure(received))
            self._leaving = x, sent
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the ranks, with the same bits on each. It is made in float32 and rounded once.

        gloo's own sum goes around a ring in pieces, so an element's order of addition would depend on where it lies.

        Raises: RanksLost
        """
        if self._peers is None:
            return x
        first, *others = self.all_gather(x)
        total = first.float()
        for part in others:
            total = total + part
        return total.to(x.dtype)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """On the first rank `x` of every rank, in the order of ranks, on the others nothing; equal shapes and dtypes.

        Raises: RanksLost
        """
        if self._peers is None:
            return [x]
        x, peers = x.contiguous(), self._peers
        if not self.is_first:
            peers.wait(peers.send(x, 0, TEAM))
            return []
        parts = [x, *(torch.empty_like(x) for _ in peers.others)]
        peers.wait(*(peers.receive(parts[rank], rank, TEAM) for rank in peers.others))
        return parts

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's contiguous `x`, written into everyone's.

        Raises: RanksLost
        """
        if (peers := self._peers) is not None:
            if self.is_first:
                peers.wait(*(peers.send(x, rank, TEAM) for rank in peers.others))
            else:
                peers.wait(peers.receive(x, 0, TEAM))
        return x


class Stages:
    """The pipeline stages that this rank's column of the group goes through: one rank of each, with equal `tp_rank`.

    Sender and receiver must agree from the plan alone what is sent, and of which shape (spec 3(b) 10).
    """

    def __init__(self, peers: _Peers | None = None) -> None:
        self._peers = peers
        self.rank, self.size = (peers.rank, len(peers.others) + 1) if peers else (0, 1)
        self._leaving: tuple[deque[tuple[torch.Tensor, distributed.Work]], ...] = (deque(), deque())
        """What is on its way, by tag, kept until it has left; gloo tells that only to those who wait."""
        self._most = (AHEAD, 2 * max(MAX_STEPS_IN_FLIGHT, 2 * self.size))
        """Messages kept, by tag. Those to the first stage wait there until a step needs them, but never longer than
        steps can be in flight; so nobody waits for them here."""

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
        if self._peers is None:
            raise RuntimeError("a group of one stage sends nothing")
        leaving = self._leaving[tag]
        while len(leaving) >= self._most[tag]:
            self._peers.wait(leaving.popleft()[1])
        tensor = tensor.contiguous()
        leaving.append((tensor, self._peers.send(tensor, to, tag)))

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        if self._peers is None:
            raise RuntimeError("a group of one stage receives nothing")
        self._peers.wait(self._peers.receive(tensor, source, tag))


class Ranks:
    """All groups of this rank in one epoch: `team` and `stages`, which are there once it has joined.

    Args:
        listener: this worker's own listening socket; rank 0 serves the store on it, every rank gives it up.
        device: where tensors are.

    Raises: ValueError, for a group on another device than the CPU.
    """

    team: Team
    stages: Stages
    on_this_machine: int
    """Ranks that share this machine's cores, this one included."""

    def __init__(
        self, assignment: Assignment, listener: socket.socket | None = None, device: str = "cpu"
    ) -> None:
        if device != "cpu":
            raise ValueError(
                f"groups of ranks on device {device!r} are not supported; ranks compute on the CPU"
            )
        self.assignment, self.shard = assignment, assignment.shard
        self._listener = listener
        self._outcome: queue.SimpleQueue[_Joined | Exception] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._waiter = _Waiter()
        self._others = sockets()
        """Not ours. Until the ranks have joined, every other socket is."""
        self._ours: set[str] | None = None

    @property
    def is_output(self) -> bool:
        """Whether this rank samples and reports results."""
        return self.assignment.rank == self.assignment.output_rank

    def join(self) -> Self:
        """Connects this rank with the others. `abort` may be called meanwhile.

        A thread of its own connects: nothing but its own patience ends a connection attempt of torch, and the epoch
        may end sooner.

        Raises: RanksLost, when the others do not come.
        """
        if self.assignment.world_size == 1:
            self._connect()
        else:
            threading.Thread(target=self._connect, name="joining", daemon=True).start()
        joined = self._outcome.get()
        if self._aborted.is_set():
            raise RanksLost("the epoch ended while its ranks were joining")
        if isinstance(joined, RuntimeError):
            raise RanksLost(f"rank {self.assignment.rank} cannot reach the others: {joined}") from joined
        if isinstance(joined, Exception):
            raise joined
        self.team, self.stages, self.on_this_machine, self._store = joined
        return self

    def _connect(self) -> None:
        listener = self._listener
        try:
            outcome: _Joined | Exception = self._joined(self.assignment, listener)
        except Exception as error:
            outcome = error
        if listener is not None:
            listener.close()
        self._ours = sockets() - self._others
        self._outcome.put(outcome)

    def _joined(self, assignment: Assignment, listener: socket.socket | None) -> "_Joined":
        if assignment.world_size == 1:
            return _Joined(Team(), Stages(), 1, None)
        store = self._meet(assignment, listener)
        together = neighbours(store, assignment)
        address = local_address(assignment.rendezvous.rpartition(":")[0])
        return _Joined(self._team(store, address), self._stages(store, address), together, store)

    def _meet(self, assignment: Assignment, listener: socket.socket | None) -> Any:
        host, _, port = assignment.rendezvous.rpartition(":")
        world = assignment.world_size
        if assignment.rank == 0:
            if listener is None:
                raise ValueError("rank 0 needs the socket it registered with")
            return _c10d.TCPStore(
                host, int(port), world, True, JOIN_TIMEOUT,
                wait_for_workers=False, master_listen_fd=listener.detach(),
            )  # fmt: skip
        for last in (*(False,) * (JOIN_TIMEOUT // ATTEMPT - 1), True):
            try:
                store = _c10d.TCPStore(host, int(port), world, False, ATTEMPT, wait_for_workers=False)
                store.set_timeout(JOIN_TIMEOUT)
                return store
            except RuntimeError:
                if last or self._aborted.is_set():
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _team(self, store: Any, address: str) -> Team:
        rank, size = self.shard.tp_rank, self.shard.tensor_parallel_size
        name = f"tp{self.shard.pp_rank}"
        return Team(self._peers(_c10d.PrefixStore(name, store), rank, size, address)) if size > 1 else Team()

    def _stages(self, store: Any, address: str) -> Stages:
        rank, size = self.shard.pp_rank, self.shard.pipeline_parallel_size
        name = f"pp{self.shard.tp_rank}"
        if size == 1:
            return Stages()
        return Stages(self._peers(_c10d.PrefixStore(name, store), rank, size, address))

    def _peers(self, store: Any, rank: int, size: int, address: str) -> _Peers:
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = JOIN_TIMEOUT
        return _Peers(_c10d.ProcessGroupGloo(store, rank, size, options), rank, size, self._waiter)

    def abort(self) -> None:
        """From any thread: whoever joins or waits in one of these groups gets RanksLost.

        The connections are shut down as well: gloo has no other way to end a wait, and the other ranks learn of it.
        """
        self._aborted.set()
        self._waiter.abort()
        self._outcome.put(RanksLost("aborted"))
        shut_down(sockets() - self._others if self._ours is None else self._ours & sockets())


class _Joined(NamedTuple):
    """All that joining yields."""

    team: Team
    stages: Stages
    on_this_machine: int
    store: Any


def neighbours(store: Any, assignment: Assignment) -> int:
    """How many ranks, which all ask this of their `store`, say that they run on this machine."""
    machine = BOOT_ID.read_bytes().strip() if BOOT_ID.exists() else socket.gethostname().encode()
    store.set(f"machine{assignment.rank}", machine)
    return [store.get(f"machine{rank}") for rank in range(assignment.world_size)].count(machine)


def sockets() -> set[str]:
    """Open sockets of this process, as "FD INODE"."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                found.add(f"{fd} {target}")
    return found


def shut_down(connections: set[str]) -> None:
    """Whoever waits for one of them, as `sockets` names them, fails soon."""
    for name in connections:
        with suppress(OSError), socket.socket(fileno=os.dup(int(name.partition(" ")[0]))) as connection:
            connection.getpeername()  # listening sockets stay: gloo ends the process when one fails
            connection.shutdown(socket.SHUT_RDWR)
