"""How the ranks of one epoch reach one another: process groups over torch.distributed, gloo on the CPU.

Nothing here is global: an epoch has its own store and groups, and the next one starts from nothing. What ranks say to
one another is in teams.py.

There is no other transport yet: groups on CUDA devices (NCCL) are refused by name.
"""

import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

from torch import distributed

from protocol.membership import Assignment
from services.worker.distributed.messages import Peers, Waiter
from services.worker.distributed.rendezvous import local_address
from services.worker.distributed.teams import Stages, Team
from services.worker.runner import RanksLost

JOIN_TIMEOUT = timedelta(seconds=60)
"""For the ranks to find one another."""
ATTEMPT = timedelta(seconds=5)
"""For one attempt to reach the first rank. An epoch that ends while its ranks join leaves a thread for that long."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Equal for all processes of a machine, in whichever container, and for no others."""
_c10d: Any = distributed  # its stubs lack most of what is used here


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
        self._waiter = Waiter()
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
        store = meet(assignment, listener, self._aborted.is_set)
        together = neighbours(store, assignment)
        address = local_address(assignment.rendezvous.rpartition(":")[0])
        return _Joined(self._team(store, address), self._stages(store, address), together, store)

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

    def _peers(self, store: Any, rank: int, size: int, address: str) -> Peers:
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = JOIN_TIMEOUT
        return Peers(_c10d.ProcessGroupGloo(store, rank, size, options), rank, size, self._waiter)

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


def meet(assignment: Assignment, listener: socket.socket | None, is_over: Callable[[], bool]) -> Any:
    """The store that the ranks share, on the socket that rank 0 registered with, its `listener`; others try to reach it
    as long as nobody says that it `is_over`.

    Raises: RuntimeError, when rank 0 is not there in time.
    """
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
            if last or is_over():
                raise
    raise AssertionError("the last attempt returns or raises")


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
