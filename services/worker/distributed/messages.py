"""Messages between the ranks of one group over gloo, and how a rank waits for them."""

import queue
import re
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
from torch import distributed

from services.worker.runner import RanksLost

STEP_TIMEOUT = timedelta(minutes=30)
"""The last resort: the scheduler's own deadline is shorter and ends in `abort`."""
Works = Sequence[distributed.Work]
_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")
"""Beginning of gloo's errors: a place in its source."""


class Tag(IntEnum):
    """Kind of a message; messages of one sender and tag arrive in order."""

    ACTIVATIONS = 0
    """From a stage to the next one."""
    FEEDBACK = 1
    """From the last stage to the first: what a step sampled."""
    ROWS = 2
    """From a stage to the next one, before the activations of the same step."""
    LAYER = 3
    """Between the tensor-parallel ranks of a stage."""


class MessageWaiter:
    """Waits for messages on a separate thread, so that `abort` always frees the waiting rank.

    A closed connection is not enough: gloo neither completes nor fails a message that was sent in part when its
    connection breaks, and no later call ends that wait.
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
        """End the present wait and refuse every later one. May be called from any thread."""
        self._aborted.set()
        self._outcome.put(RanksLost("the epoch ended while ranks waited for one another"))


def _serve(works: "queue.SimpleQueue[Works | None]", outcome: "queue.SimpleQueue[Any]") -> None:
    while (some := works.get()) is not None:
        error = failure(some)
        del some  # it refers to tensors
        outcome.put(error)


def raise_lost(error: RuntimeError | RanksLost | None) -> None:
    """Raises: RanksLost, if there is an error."""
    if isinstance(error, RanksLost):
        raise error
    if error is not None:
        raise connection_lost(error) from error


def failure(works: Works) -> RuntimeError | None:
    """Wait for `works` on the calling thread, and return the error of the first that failed."""
    try:
        for work in works:
            work.wait(STEP_TIMEOUT)  # the group's own timeout is that of joining
    except RuntimeError as error:
        return error
    return None


def connection_lost(error: RuntimeError) -> RanksLost:
    """Return the loss that an error of gloo means."""
    return RanksLost(f"a connection between ranks has failed (gloo: {one_line(error)})")


def one_line(error: Exception) -> str:
    """Return what an error of torch or gloo says, without its place in their source and without C++ frames."""
    return _PLACE.sub("", str(error).partition("\n")[0])


class Peers:
    """Messages between the ranks of one group, in order per sender and tag.

    gloo's collectives would serve as well, but its plain messages leave on the calling thread: with few ranks they take
    a third of the time.
    """

    def __init__(self, group: Any, rank: int, size: int, waiter: MessageWaiter) -> None:
        self._group, self.rank, self.wait = group, rank, waiter.wait
        self.others = [other for other in range(size) if other != rank]

    def send(self, tensor: torch.Tensor, to: int, tag: Tag) -> distributed.Work:
        """Send a contiguous tensor, which must not change until it has left.

        Raises: RanksLost
        """
        try:
            return self._group.send([tensor], to, tag)
        except RuntimeError as error:
            raise connection_lost(error) from error

    def receive(self, tensor: torch.Tensor, source: int, tag: Tag) -> distributed.Work:
        """Raises: RanksLost"""
        try:
            return self._group.recv([tensor], source, tag)
        except RuntimeError as error:
            raise connection_lost(error) from error
