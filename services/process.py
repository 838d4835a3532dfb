"""Start and lifetime of a process."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


@contextmanager
def collection_paused() -> Iterator[None]:
    """Import modules without garbage collection, which takes up to a fifth of the time, and exempt them from later
    collections: what an import allocates stays alive."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent has ended, even if the parent was killed.

    On Linux, the end of the parent's thread that started this process counts as well. On other systems this function
    only notices a parent that has already ended.

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)
