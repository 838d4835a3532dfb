"""Shared memory of the ranks of one epoch that run on one machine.

vLLM's ranks exchange tensors through files in /dev/shm (on processors with AVX-512). vLLM unlinks these files only when
a process runs to its regular end, and never frees their pages before. Here the files have a name only while the groups
form: each rank maps them, all ranks meet, and the names are removed. So a process that is killed later leaves nothing.

While the groups form, the first rank holds a locked private directory in /dev/shm, and the names of the files begin
with the name of the directory. A directory without a lock, or a file without its directory, belongs to no living group;
the next worker that starts removes it.
"""

import hashlib
import mmap
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from services.private import private_directory, sweep
from services.worker.distributed.ranks import boot_id

DIRECTORY = Path("/dev/shm")  # noqa: S108  vLLM's kernels put their files there
PREFIX = "runahead-shm-"
"""First part of every name."""
_KEY = "shared-memory"
"""Key in the store of the ranks: the machine of the first rank and the name that its neighbours share."""


class VllmSharedMemory:
    """Names and pages of the shared memory of one epoch."""

    def __init__(self) -> None:
        self._directory = ExitStack()
        self._name = ""
        self._pages: list[mmap.mmap] = []

    def agree(self, store: Any, rank: int) -> str:
        """Return the name under which this rank shares memory: equal for the ranks on one machine.

        Args:
            store: of torch.distributed, common to all ranks
        """
        here = machine()
        if rank == 0:
            if os.access(DIRECTORY, os.W_OK):
                self._name = self._directory.enter_context(private_directory(DIRECTORY, PREFIX)).name
            store.set(_KEY, f"{here} {self._name}")
        else:
            first, _, name = store.get(_KEY).decode().partition(" ")
            self._name = name if first == here else ""
        return self._name or f"{here}-{os.getpid()}"

    def unlink(self, barrier: Callable[[], object]) -> None:
        """Remove the names. Call when this rank's groups are formed; `barrier` waits until all ranks call it."""
        barrier()
        for path in self._files():
            with path.open("r+b") as file:
                self._pages.append(mmap.mmap(file.fileno(), 0))
        barrier()
        self.remove_names()

    def free(self) -> None:
        """Free the pages, which vLLM keeps mapped until its process ends. Call when the results of all ranks are void,
        because a rank that still computes reads zeros."""
        for pages in self._pages:
            pages.madvise(mmap.MADV_REMOVE)
            pages.close()
        self._pages.clear()

    def remove_names(self) -> None:
        """Remove names that exist because the groups were never formed."""
        for path in self._files():
            path.unlink(missing_ok=True)  # every rank of the machine removes them
        self._directory.close()

    def _files(self) -> list[Path]:
        return list(DIRECTORY.glob(f"{self._name}-*")) if self._name else []


def sweep_shared_memory() -> None:
    """Remove what groups left whose processes are dead."""
    sweep(DIRECTORY, PREFIX)
    for path in DIRECTORY.glob(f"{PREFIX}*-*"):
        directory = PREFIX + path.name.removeprefix(PREFIX).partition("-")[0]
        if not path.with_name(directory).exists():
            with suppress(OSError):  # removed meanwhile, or another user's
                path.unlink()


def machine() -> str:
    """Return a name that is equal for the processes that see the same shared memory, and for no others."""
    memory = DIRECTORY.stat().st_dev if DIRECTORY.is_dir() else os.getpid()
    return hashlib.sha256(boot_id() + str(memory).encode()).hexdigest()[:12]
