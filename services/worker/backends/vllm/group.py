"""The process groups of one epoch: ours, from which vLLM makes its own.

vLLM takes the group that is there. So the ranks meet at the socket that rank 0 registered with, and those that do not
come are waited for no longer than anywhere else in this project. To form its groups vLLM lets ranks send one another
objects that run code when they are read, so all of them must be trusted, as torch's own transport asks for too.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import distributed

from protocol.membership import Assignment
from services.worker.backends.vllm import names
from services.worker.backends.vllm.shared_memory import SharedMemory, sweep_shared_memory
from services.worker.distributed.messages import STEP_TIMEOUT
from services.worker.distributed.ranks import count_on_this_machine, meet, shut_down, sockets
from services.worker.runner import RanksLost

_c10d: Any = distributed  # its stubs lack most of what is used here


class Group:
    """This rank's connections to the others.

    Args:
        listener: this worker's own listening socket; rank 0 serves the store on it, every rank gives it up
    """

    def __init__(self, assignment: Assignment, listener: socket.socket | None) -> None:
        self._assignment, self._listener = assignment, listener
        self._others = sockets()
        """Not ours."""
        self._aborted = False
        self._memory = SharedMemory()
        self.on_this_machine = 1
        """Ranks that share this machine's cores, this one included; known once it has joined."""

    @property
    def is_of_several(self) -> bool:
        return self._assignment.world_size > 1

    def join(self) -> str:
        """Connects this rank with the others. Returns the group's name.

        vLLM lets ranks share memory if they know their group by the same name: those that share a machine do.

        Raises: RanksLost, when the others do not come.
        """
        assignment = self._assignment
        with self.watched():
            try:
                sweep_shared_memory()
                store = self._store()
                self.on_this_machine = count_on_this_machine(store, assignment)
                _c10d.init_process_group(
                    "gloo",
                    store=store,
                    rank=assignment.rank,
                    world_size=assignment.world_size,
                    timeout=STEP_TIMEOUT,
                )
                name = self._memory.agree(store, assignment.rank) if self.is_of_several else "alone"
            finally:
                if self._listener is not None:
                    self._listener.close()
        return f"tcp://{assignment.rendezvous}:{name}"

    def formed(self) -> None:
        """Remove the names of the shared memory. Call when vLLM has formed its own groups.

        Raises: RanksLost
        """
        if self.is_of_several:
            with self.watched():
                self._memory.formed(_c10d.barrier)

    def _store(self) -> Any:
        if not self.is_of_several:
            return _c10d.HashStore()
        return meet(self._assignment, self._listener, lambda: self._aborted)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raises: RanksLost, where what is done inside fails for want of another rank."""
        try:
            yield
        except RuntimeError as error:
            if not self.is_of_several or not (
                self._aborted or isinstance(error, _c10d.DistError) or "gloo" in str(error)
            ):
                raise
            raise RanksLost(f"rank {self._assignment.rank} cannot reach the others: {error}") from error

    def abort(self) -> None:
        """From any thread: whoever waits for another rank gets RanksLost, unless it waits in vLLM's shared memory."""
        self._aborted = True
        if self.is_of_several:
            shut_down(sockets() - self._others)

    def leave(self) -> None:
        """Waits for nobody."""
        with suppress(RuntimeError):
            names.destroy_model_parallel()
            names.destroy_distributed_environment()
        names.group_name_counter.clear()  # ranks share memory if they count alike; one that is new starts at 0
        self._memory.release()
