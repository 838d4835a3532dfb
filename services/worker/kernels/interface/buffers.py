"""Memory that recorded operations read and write."""

import copy
from typing import Self, TypeVar

import torch


class Buffers:
    """Tensors whose addresses do not change. The rows of each are of one kind, such as "tokens".

    A subclass creates them with `_rows`, as attributes or in tuples.

    Args:
        where: the device.
        capacity: maximum number of rows of each kind, at least 1.
    """

    def __init__(self, where: torch.device, **capacity: int) -> None:
        self.where, self.capacity = where, capacity
        self._kinds: dict[int, str] = {}
        self._paddings: list[tuple[torch.Tensor, int]] = []

    def _rows(
        self, kind: str, *shape: int, dtype: torch.dtype = torch.float32, padding: int | None = None
    ) -> torch.Tensor:
        """Return a tensor [capacity of `kind`, *shape].

        Args:
            padding: value of rows that compute nothing, and of all rows at first; None: padding rows keep what was
                computed there last, at first zeros, so that operations on them stay finite
        """
        tensor = torch.zeros(self.capacity[kind], *shape, dtype=dtype, device=self.where)
        self._kinds[tensor.data_ptr()] = kind
        if padding is not None:
            self._paddings.append((tensor, padding))
            tensor.fill_(padding)
        return tensor

    def reset(self) -> None:
        """Make all rows padding rows."""
        for tensor, value in self._paddings:
            tensor.fill_(value)

    def kind_of(self, tensor: torch.Tensor) -> str:
        """Return the kind of rows of one of these tensors, or of a view that begins where the tensor begins.

        Raises: KeyError, for any other tensor.
        """
        return self._kinds[tensor.data_ptr()]

    @property
    def num_bytes(self) -> int:
        values = [each if isinstance(each, tuple) else (each,) for each in vars(self).values()]
        return sum(tensor.nbytes for value in values for tensor in value if isinstance(tensor, torch.Tensor))

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
