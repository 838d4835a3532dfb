"""Memory that recorded operations read and write."""

import copy
from typing import Self, TypeVar

import torch


class Buffers:
    """Tensors whose addresses do not change. The rows of each are of one kind, such as "tokens".

    A subclass creates them with `_rows`, as attributes or in tuples.

    Args:
        capacity: maximum number of rows of each kind, at least 1.
    """

    def __init__(self, **capacity: int) -> None:
        self.capacity = capacity
        self._kinds: dict[int, str] = {}

    def _rows(self, kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor [capacity of `kind`, *shape], not initialised."""
        tensor = torch.empty(self.capacity[kind], *shape, dtype=dtype)
        self._kinds[tensor.data_ptr()] = kind
        return tensor

    def kind_of(self, tensor: torch.Tensor) -> str:
        """Return the kind of rows of one of these tensors, or of a view that begins where the tensor begins.

        Raises: KeyError, for any other tensor.
        """
        return self._kinds[tensor.data_ptr()]

    def holds(self, **counts: int) -> bool:
        """Return whether there is room for these numbers of rows."""
        return all(count <= self.capacity[kind] for kind, count in counts.items())

    def first(self, **counts: int) -> Self:
        """Return views of the first rows; tensors of kinds that are not named stay whole."""

        def cut(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            if not isinstance(value, torch.Tensor):
                return value
            return value[: counts.get(self.kind_of(value))]

        views = copy.copy(self)
        vars(views).update({name: cut(value) for name, value in vars(self).items()})
        return views


B = TypeVar("B", bound=Buffers)
