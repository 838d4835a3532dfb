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
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import torch

from services.process import name_this_thread
from services.worker.runner import RanksLost

T = TypeVar("T")
Working = Callable[[], AbstractContextManager[None]]
CLOSE_TIMEOUT = 10.0
"""Seconds that a running job has to end when its thread is closed."""


class Job(Generic[T]):
    """A function that another thread calls once, and its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._ended = threading.Lock()
        self._ended.acquire()
        self._value: T
        self._error: BaseException | None = None

    def run(self) -> RanksLost | None:
        """Call the function. Return its error, if it has lost the other ranks."""
        function, self._function = self._function, None
        assert function is not None, "a job runs once"
        try:
            self._value = function()
        except BaseException as error:  # belongs to the thread that reads the result
            _forget_locals(error)
            self._error = error
            return error if isinstance(error, RanksLost) else None
        finally:
            self._ended.release()
        return None

    def refuse(self, error: Exception) -> None:
        """End the job with `error` instead of calling the function."""
        self._function, self._error = None, error
        self._ended.release()

    @property
    def ended(self) -> bool:
        return not self._ended.locked()

    @property
    def failed(self) -> bool:
        """True, if the function has raised an error or was not called."""
        return self._error is not None

    def wait(self) -> None:
        """Wait for the end, without spinning."""
        with self._ended:
            pass

    def get(self) -> T:
        """Wait for the end, and return the result. May be called by any thread, repeatedly.

        Raises: the error of the function
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value


class ComputeThread:
    """Runs jobs one after the other, in torch's inference mode, with signals blocked.

    After a job that has lost the other ranks, later ones fail in the same way: their inputs may be missing.

    Args:
        working: makes the context in which all jobs run.
    """

    def __init__(self, working: Working = nullcontext) -> None:
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        arguments = self._jobs, self._closed, working
        self._thread = threading.Thread(target=_serve, args=arguments, name="compute", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, function: Callable[[], T]) -> Job[T]:
        """Run `function` after all functions that were submitted before."""
        job = Job(function)
        self._jobs.put(job)  # type: ignore[arg-type]  # the queue's type has no room for T
        return job

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


def _forget_locals(error: BaseException | None) -> None:
    """Drop the variables of the functions that an error has left, which refer to the epoch. The lines stay."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _serve(jobs: "queue.SimpleQueue[Job[object] | None]", closed: threading.Event, working: Working) -> None:
    """Signals belong to the main thread, which would not wake up from a wait for one that arrives here."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    name_this_thread()
    torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps the number for each calling thread
    lost: RanksLost | None = None
    with torch.inference_mode(), working():
        while (job := jobs.get()) is not None:
            if closed.is_set():
                lost = lost or RanksLost("the epoch has ended")
            if lost is not None:
                job.refuse(lost)
            else:
                lost = job.run()
            del job  # it refers to the result
