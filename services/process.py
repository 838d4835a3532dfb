"""Start and lifetime of a process."""

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

_PR_SET_PDEATHSIG = 1

start_log = logging.getLogger("runahead.start")
"""Phases of a process's start, at level DEBUG, such as "importing torch"; `STARTED` ends them. `serve` shows them."""
STARTED = ""
PHASE_MARK = "\x1e"
"""First character of a line of output that is a phase, not text for people."""


def print_phases() -> None:
    """Write the phases of this process's start to stdout, each as a line after `PHASE_MARK`."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"{PHASE_MARK}%(message)s"))
    start_log.addHandler(handler)
    start_log.setLevel(logging.DEBUG)
    start_log.propagate = False


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


def end_start_up() -> None:
    """Exempt what was made so far from garbage collections, which would take tens of milliseconds for it, and give
    freed memory back to the system: a tokenizer takes tens of MiB more while it is loaded."""
    gc.collect()
    gc.freeze()
    with suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def name_this_thread() -> None:
    """Show the Python name of the calling thread in /proc and in `top -H`, where the system has them."""
    with suppress(OSError):
        Path("/proc/thread-self/comm").write_text(threading.current_thread().name)


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


EXIT_HUNG = int(signal.SIGALRM)
"""Exit status of a process that its alarm has ended."""
HANG_FACTOR = 5
"""A process hangs if it gives no sign of life for this many times the seconds after which it counts as lost."""


class HangAlarm:
    """Ends this process if it is not set again in time, and writes the stacks of all threads to stderr. `NO_ALARM`
    never does.

    The kernel's timer and signal handlers in C do it, so it works while a thread never returns from a loop or from a
    library that holds the interpreter's lock. The time in which the process is stopped counts: after so long the others
    have replaced it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @classmethod
    def install(cls, seconds: float) -> Self:
        """Install the handlers. The alarm is not set yet."""
        libc = ctypes.CDLL(None)
        # The handler is `_exit` itself, with the signal's number as the status: a container's first process ignores
        # signals that have no handler.
        libc.signal(int(signal.SIGALRM), libc._exit)  # noqa: SLF001 - a function of C
        faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
        return cls(seconds)

    def set(self) -> None:
        """The process gives a sign of life."""
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def cancel(self) -> None:
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)


NO_ALARM = HangAlarm(0.0)
"""For services that share a process."""


@contextmanager
def signals_to(writer: socket.socket, numbers: Collection[int]) -> Iterator[None]:
    """Let each of these signals write its number to a socket, and do nothing else."""
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    previous = signal.set_wakeup_fd(writer.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_signals() -> Iterator[socket.socket]:
    """Yield a socket that becomes readable when SIGTERM or SIGINT arrives."""
    reader, writer = socket.socketpair()
    with reader, writer, signals_to(writer, (signal.SIGTERM, signal.SIGINT)):
        yield reader


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent (its process id) has ended, even if the parent was killed.

    On Linux, the end of the parent's thread that started this process counts as well. On other systems this function
    only notices a parent that has already ended.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)
