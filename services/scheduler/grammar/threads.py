"""Threads beside the scheduler's loop that run the grammar library: how they start, and how they wake the loop."""

import contextlib
import os
import select
import threading
from collections.abc import Callable

from services.scheduler.grammar.limits import STACK_BYTES


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread whose stack holds the library's recursion."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    before = threading.stack_size(4 * STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


class LoopWakeup:
    """A pipe that is readable from `set` to `clear`, for a loop that polls file descriptors."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it is readable
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def wait(self, seconds: float) -> bool:
        """Wait until it is set. Return False if it is not within so many seconds."""
        return bool(select.select([self._reader], [], [], seconds)[0])

    def close(self) -> None:
        os.close(self._writer)
        os.close(self._reader)
