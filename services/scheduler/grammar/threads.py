"""Threads beside the scheduler's loop that run the grammar library: how they start, and how they wake the loop."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from services.scheduler.grammar.limits import STACK_BYTES


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that are started meanwhile have stacks that hold the library's recursion."""
    before = threading.stack_size(4 * STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


class LoopWakeup:
    """A pipe that is readable from `set` to `clear`, for a loop that polls file descriptors. It holds one byte at most,
    so that a loop may clear it in every turn without a system call."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._is_set = False
        self._reader, self._writer = os.pipe()

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        with self._changing:
            if not self._is_set:
                self._is_set = True
                os.write(self._writer, b"\0")

    def clear(self) -> None:
        with self._changing:
            if self._is_set:
                self._is_set = False
                os.read(self._reader, 1)

    def close(self) -> None:
        os.close(self._writer)
        os.close(self._reader)
