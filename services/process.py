"""Start and lifetime of a process."""

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


def processor_seconds() -> float:
    """Return the processor time that this process and its living descendants have used, seconds."""
    ticks = os.sysconf("SC_CLK_TCK")
    return time.process_time() + sum(map(_ticks, _descendants(os.getpid()))) / ticks


def _descendants(pid: int) -> Iterator[int]:
    """Yield processes that this one has started, and those that they have; none where the kernel does not list them."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)


def _ticks(pid: int) -> int:
    """Return the processor time of another process, in ticks; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


WORK = 0.1
"""Seconds of processor time that count as work; heartbeats alone use less within minutes."""


class IdleWatch:
    """Idleness of a process that loads: a hung one uses no processor time. Without a clock of its own."""

    def __init__(self) -> None:
        self._work = 0.0
        self.since: float | None = None
        """When the last work was seen, or the first time was measured; None: nothing is measured."""

    def observe(self, work: float, now: float) -> None:
        """`work`: seconds of processor time so far; 0.0: not measured."""
        if not work:
            self.since = None
        elif self.since is None or not 0 <= work - self._work < WORK:
            self._work, self.since = work, now

    def seconds(self, now: float) -> float:
        """Return the seconds since the last work; 0.0 if nothing is measured."""
        return 0.0 if self.since is None else now - self.since


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
