"""Lifetime of a child process."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


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
