"""Messages between the ranks of one group, over gloo, and how long anybody waits for them."""

import queue
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from services.worker.runner import RanksLost

STEP_TIMEOUT = timedelta(minutes=30)
"""The last resort: the scheduler's own deadline is shorter and ends in `abort`."""
Works = Sequence[distributed.Work]


class Waiter:
    """Waits for messages on a thread of its own, so that `abort` frees whoever needs them, always.

    A closed connection is not enough: a message that is half on its way when its connection breaks is neither completed
    nor failed by gloo, and no later call ends that wait.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Works | None] = queue.SimpleQueue()
        self._outcome: queue.SimpleQueue[RuntimeError | RanksLost | None] = queue.SimpleQueue()
        self._aborted = threading.Event()
        arguments = self._works, self._outcome
        threading.Thread(target=_serve, args=arguments, name="messages", daemon=True).start()
        weakref.finalize(self, self._works.put, None)

    def wait(self, *works: distributed.Work) -> None:
        """Raises: RanksLost"""
        if self._aborted.is_set():
            raise RanksLost("the epoch has ended")
        self._works.put(works)
        raise_lost(self._outcome.get())

    def abort(self) -> None:
        """From any thread. From now on nothing can be waited for."""
        self._aborted.set()
        self._outcome.put(RanksLost("the epoch ended while ranks waited for one another"))


def _serve(works: "queue.SimpleQueue[Works | None]", outcome: "queue.SimpleQueue[Any]") -> None:
    while (some := works.get()) is not None:
        error = failure(some)
        del some  # it keeps tensors
        outcome.put(error)


def raise_lost(error: RuntimeError | RanksLost | None) -> None:
    """Raises: RanksLost, if there is an error."""
    if error is not None:
        raise RanksLost(str(error)) from error


def failure(works: Works) -> RuntimeError | None:
    """What kept one of them from ending; waits on the calling thread."""
    try:
        for work in works:
            work.wait(STEP_TIMEOUT)  # the group's own timeout is that of joining
    except RuntimeError as error:
        return error
    return None


class Peers:
    """Messages between the ranks of one group. All of gloo's collectives would do, but its plain messages leave on the
    calling thread: with few ranks they take a third of the time. They arrive in order per sender and tag."""

    def __init__(self, group: Any, rank: int, size: int, waiter: Waiter) -> None:
        self._group, self.rank, self.wait = group, rank, waiter.wait
        self.others = [other for other in range(size) if other != rank]

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> distributed.Work:
        """`tensor` is contiguous and must not change until it has left. Raises: RanksLost"""
        try:
            return self._group.send([tensor], to, tag)
        except RuntimeError as error:
            raise RanksLost(str(error)) from error

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> distributed.Work:
        """Raises: RanksLost"""
        try:
            return self._group.recv([tensor], source, tag)
        except RuntimeError as error:
            raise RanksLost(str(error)) from error
