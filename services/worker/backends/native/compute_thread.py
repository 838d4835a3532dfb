"""A thread that runs jobs in the order in which they are submitted, and their results.

A job holds the state of an epoch only until it has run, so an epoch that nobody uses any more is freed, and its thread
ends.
"""

import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from services.process import name_this_thread
from services.worker.runner import RanksLost

T = TypeVar("T")
Working = Callable[[], AbstractContextManager[None]]
Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
CLOSE_TIMEOUT = 10.0
"""Seconds that a running job has to end when its thread is closed."""


class ComputeThread:
    """Runs jobs one after the other, in torch's inference mode, with signals blocked.

    After a job that has lost the other ranks, later ones fail in the same way: their inputs may be missing.

    Args:
        working: makes the context in which all jobs run.
    """

    def __init__(self, working: Working = nullcontext) -> None:
        self._jobs: Jobs = queue.SimpleQueue()
        self._closed = threading.Event()
        arguments = self._jobs, self._closed, working
        self._thread = threading.Thread(target=_serve, args=arguments, name="compute", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` after all functions that were submitted before."""
        result: Future[T] = Future()
        self._jobs.put((result, function))
        return result

    @property
    def closing(self) -> bool:
        return self._closed.is_set()

    def close(self) -> bool:
        """Refuse the jobs that have not begun with RanksLost, and end the thread.

        Returns: False, if the running job did not end in time.
        """
        self._closed.set()
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT)
        return not self._thread.is_alive()


def _forget_frames(error: BaseException | None) -> None:
    """Replace the traceback of an error by a note with its lines: its frames and their functions refer to the epoch,
    whose memory the next one needs."""
    while error is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)).rstrip())
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _serve(jobs: Jobs, closed: threading.Event, working: Working) -> None:
    """Signals belong to the main thread, which would not wake up from a wait for one that arrives here."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    name_this_thread()
    torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps the number for each calling thread
    lost: RanksLost | None = None
    error: BaseException | None
    with torch.inference_mode(), working():
        while (job := jobs.get()) is not None:
            if closed.is_set():
                lost = lost or RanksLost("the epoch has ended")
            result, function = job
            del job
            value, error = None, lost
            if lost is None:
                try:
                    value = function()
                except BaseException as raised:  # belongs to the thread that reads the result
                    _forget_frames(raised)
                    error, lost = raised, raised if isinstance(raised, RanksLost) else None
            del function  # it refers to the epoch, which nobody may use any more once the result is there
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)
            del result, value, error
