"""The process groups of one epoch: torch.distributed with gloo, on the CPU, and shared memory where ranks can map it.

Nothing here is global: an epoch has its own store and groups, and the next one starts from nothing. The messages within
a group are in tensor_parallel.py and pipeline.py. Groups on CUDA devices (NCCL) are not supported and refused by name.
"""

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch import distributed

from protocol.membership import Assignment
from services.worker.distributed.messages import MessageWaiter, Peers, one_line
from services.worker.distributed.pipeline import PipelineGroup
from services.worker.distributed.rendezvous import local_address
from services.worker.distributed.shared_memory import SharedMemory
from services.worker.distributed.tensor_parallel import TensorParallelGroup
from services.worker.runner import LoadError, RanksLost

log = logging.getLogger("runahead.worker")

JOIN_TIMEOUT = timedelta(seconds=60)
"""Time limit for all ranks to join."""
ATTEMPT = timedelta(seconds=5)
"""Time limit of one attempt to reach rank 0. An epoch that ends while its ranks join leaves a thread for that long."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_c10d: Any = distributed  # its stubs lack most of what is used here


class Ranks:
    """All groups of this rank in one epoch. `tensor_parallel` and `pipeline` are those of the epoch after `join`.

    Args:
        listener: this worker's own listening socket; rank 0 serves the store on it, the other ranks close it.
    """

    def __init__(self, assignment: Assignment, listener: socket.socket | None = None) -> None:
        self.assignment, self.shard = assignment, assignment.shard
        self._listener = listener
        self._outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        self._waiter = MessageWaiter()
        self.tensor_parallel, self.pipeline = TensorParallelGroup(), PipelineGroup()
        self.on_this_machine = 1
        """Number of ranks that share this machine's cores, this one included."""
        self._others = sockets()
        """Sockets of other owners. Until the ranks have joined, every socket beside these belongs to the groups."""
        self._ours: set[str] | None = None
        self._memory: SharedMemory | None = None

    @property
    def is_output(self) -> bool:
        """True on the rank that samples and reports results."""
        return self.assignment.rank == self.assignment.output_rank

    def join(self) -> Self:
        """Connect this rank with the others. `abort` may be called meanwhile.

        A separate thread connects: only its own timeout ends a connection attempt of torch, and the epoch may end
        sooner.

        Raises: RanksLost, if the others do not join in time or `abort` is called; LoadError, if torch listens on
            another address than the configured one.
        """
        if self.assignment.world_size == 1:
            self._connect()
        else:
            threading.Thread(target=self._connect, name="joining", daemon=True).start()
        error = self._outcome.get()
        if self._aborted.is_set():
            raise RanksLost("the epoch ended while its ranks were joining")
        if isinstance(error, RuntimeError):
            raise RanksLost(f"rank {self.assignment.rank} cannot reach the others: {one_line(error)}") from error
        if error is not None:
            raise error
        return self

    def _connect(self) -> None:
        outcome: Exception | None = None
        try:
            if self.assignment.world_size > 1:
                self._form_groups(self.assignment)
        except Exception as error:
            outcome = error
        if self._listener is not None:
            self._listener.close()
        self._ours = sockets() - self._others
        if outcome is None and self.assignment.world_size > 1:
            host = self.assignment.rendezvous.rpartition(":")[0]
            try:
                check_listeners(self._ours, {host, local_address(host)})
            except LoadError as error:
                outcome = error
        self._outcome.put(outcome)

    def _form_groups(self, assignment: Assignment) -> None:
        self._store = store = meet(assignment, self._listener, self._aborted.is_set)
        self.on_this_machine = count_on_this_machine(store, assignment)
        address, shard = local_address(assignment.rendezvous.rpartition(":")[0]), self.shard
        stage, size = f"tp{shard.pp_rank}", shard.tensor_parallel_size
        peers = connect(store, stage, shard.tp_rank, size, address, self._waiter)
        if peers is not None:
            self._memory = SharedMemory.join(_c10d.PrefixStore(f"{stage}/memory", store), shard.tp_rank, size)
            if self._memory is None:
                log.info("the tensor-parallel ranks cannot share memory; they exchange messages through gloo")
        self.tensor_parallel = TensorParallelGroup(peers, self._memory)
        column, size = f"pp{shard.tp_rank}", shard.pipeline_parallel_size
        self.pipeline = PipelineGroup(connect(store, column, shard.pp_rank, size, address, self._waiter))

    def abort(self) -> None:
        """Make every present and later wait in these groups raise RanksLost. May be called from any thread.

        The connections are shut down as well: gloo has no other way to end a wait, and the other ranks notice it.
        """
        self._aborted.set()
        self._waiter.abort()
        if self._memory is not None:
            self._memory.abort()
        self._outcome.put(RanksLost("aborted"))
        shut_down(sockets() - self._others if self._ours is None else self._ours & sockets())


def meet(assignment: Assignment, listener: socket.socket | None, is_over: Callable[[], bool]) -> Any:
    """Return the store that the ranks share. Rank 0 serves it on `listener`, the socket that it registered with.

    Args:
        is_over: returns True when the epoch has ended; the other ranks then stop trying to reach rank 0.

    Raises: RuntimeError, if rank 0 cannot be reached in time.
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


def connect(store: Any, prefix: str, rank: int, size: int, address: str, waiter: MessageWaiter) -> Peers | None:
    """Return the connections within one group, or None for a group of one.

    Args:
        prefix: the group's name in the store that all ranks share
        address: of this machine, to listen on
    """
    if size == 1:
        return None
    # torch has no public way to choose the address of a group.
    options = _c10d.ProcessGroupGloo._Options()  # noqa: SLF001
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    options._timeout = JOIN_TIMEOUT  # noqa: SLF001
    group = _c10d.ProcessGroupGloo(_c10d.PrefixStore(prefix, store), rank, size, options)
    return Peers(group, rank, size, waiter)


def boot_id() -> bytes:
    """Return a name that is equal for all processes of a machine, in every container, and for no other machine's."""
    return _BOOT_ID.read_bytes().strip() if _BOOT_ID.exists() else socket.gethostname().encode()


def count_on_this_machine(store: Any, assignment: Assignment) -> int:
    """Return the number of ranks on this machine, this one included. Every rank must call it on the shared store."""
    machine = boot_id()
    store.set(f"machine{assignment.rank}", machine)
    return [store.get(f"machine{rank}") for rank in range(assignment.world_size)].count(machine)


def sockets() -> set[str]:
    """Return the open sockets of this process, as "FD INODE"."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                found.add(f"{fd} {target}")
    return found


def check_listeners(own: set[str], allowed: set[str]) -> None:
    """Check the addresses of listening sockets, given as `sockets` returns them: who reaches one can change tensors.

    Raises: LoadError, if one listens on another address than the allowed ones.
    """
    for name in own:
        with suppress(OSError), socket.socket(fileno=os.dup(int(name.partition(" ")[0]))) as listener:
            is_internet = listener.family in (socket.AF_INET, socket.AF_INET6)
            if not is_internet or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            address = str(listener.getsockname()[0])
            if address not in allowed:
                raise LoadError(
                    f"torch.distributed listens on {address} instead of {' or '.join(sorted(allowed))}, and it has no "
                    "authentication; set --host-ip to the address of a network of the ranks' own"
                )


def shut_down(connections: set[str]) -> None:
    """Shut down connections, given as `sockets` returns them; every wait for one of them fails soon."""
    for name in connections:
        with suppress(OSError), socket.socket(fileno=os.dup(int(name.partition(" ")[0]))) as connection:
            connection.getpeername()  # listening sockets stay: gloo ends the process when one fails
            connection.shutdown(socket.SHUT_RDWR)
