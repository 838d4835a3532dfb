"""Sequences of operations that are recorded once and run with every step."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from services.worker.backends.native.kernels.interface.buffers import Buffers

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class Recording(Protocol[T_co]):
    """A sequence of operations over buffers."""

    def run(self, **counts: int) -> T_co:
        """Run the operations over these numbers of rows.

        Returns: the result of the recorded function. Tensors in it are buffers, of which the first rows count.
        """
        ...


class EagerRecording(Generic[T]):
    """A `Recording` that calls the function each time."""

    def __init__(self, body: Callable[[Any], T], buffers: Buffers) -> None:
        self._body, self._buffers = body, buffers

    def run(self, **counts: int) -> T:
        return self._body(self._buffers.first(**counts))
