"""The process groups of one epoch: ours, from which vLLM makes its own.

vLLM takes the group that is there. So the ranks meet at the socket that rank 0 registered with, and those that do not
come are waited for no longer than anywhere else in this project. To form its groups vLLM lets ranks send one another
objects that run code when they are read, so all of them must be trusted, as torch's own transport asks for too.
"""

import hashlib
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import distributed

from protocol.membership import Assignment
from services.private import private_directory, short_base
from services.worker.backends.vllm import names
from services.worker.distributed.messages import STEP_TIMEOUT
from services.worker.distributed.ranks import BOOT_ID, meet, neighbours, shut_down, sockets
from services.worker.runner import RanksLost

_c10d: Any = distributed  # its stubs lack most of what is used here
SHARED_MEMORY = "/dev/shm"  # noqa: S108  what is there is vLLM's
PRIVATE = "runahead-queues-"
"""How the name of the directory begins that holds the sockets of vLLM's message queues."""


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
        self._directory = ExitStack()
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
                if self.is_of_several:
                    self._keep_sockets_together()
                store = self._store()
                self.on_this_machine = neighbours(store, assignment)
                _c10d.init_process_group(
                    "gloo",
                    store=store,
                    rank=assignment.rank,
                    world_size=assignment.world_size,
                    timeout=STEP_TIMEOUT,
                )
            finally:
                if self._listener is not None:
                    self._listener.close()
        return f"tcp://{assignment.rendezvous}.{_machine() if self.is_of_several else os.getpid()}"

    def _keep_sockets_together(self) -> None:
        """vLLM's message queues bind sockets to new names and never unlink them: in a directory that goes with us."""
        base = short_base(PRIVATE, str(uuid.uuid4()))
        names.disable_envs_cache()  # the epoch before may have turned it on
        directory = self._directory.enter_context(private_directory(base, PRIVATE))
        os.environ["VLLM_RPC_BASE_PATH"] = str(directory)

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
        self._directory.close()


def _machine() -> str:
    """Equal for the processes that see the same shared memory, and for no others."""
    machine = BOOT_ID.read_bytes() if BOOT_ID.exists() else socket.gethostname().encode()
    memory = os.stat(SHARED_MEMORY).st_dev if os.path.isdir(SHARED_MEMORY) else os.getpid()
    return hashlib.sha256(machine + str(memory).encode()).hexdigest()[:12]
