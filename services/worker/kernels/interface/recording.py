"""Sequences of operations that are recorded once and run with every step."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from services.worker.kernels.interface.buffers import Buffers

T_co = TypeVar("T_co", covariant=True)
Captured = Callable[[int, int], None]
"""Called with the number of captured sizes, and that of all."""


class Recording(Generic[T_co]):
    """A sequence of operations over buffers: those that `body` calls on them. Here it is called each time."""

    def __init__(self, body: Callable[[Any], T_co], buffers: Buffers) -> None:
        self._body, self._buffers = body, buffers

    def run(self, **counts: int) -> T_co:
        """Run the operations over these numbers of rows.

        Returns: the result of the recorded function. Tensors in it are buffers, of which the first rows count.
        """
        return self._body(self._buffers.first(**counts))

    def capture(self, progress: Captured) -> int:
        """Prepare what `run` replays, before the first step, if there is something to prepare. It may make all rows of
        the buffers padding rows.

        Returns: bytes of device memory that this takes.
        """
        return 0
