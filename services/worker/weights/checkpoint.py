"""The tensors of a checkpoint in any file format. Names and shapes are those of Hugging Face checkpoints."""

from collections.abc import Sequence
from typing import Protocol

import torch

from services.worker.kernels.quantized_weight import BlockRows
from services.worker.runner import LoadError

Cut = tuple[slice, ...]
"""Rows (and columns) of a tensor; `()` is all of it."""


class Checkpoint(Protocol):
    """Tensors by name. All ranks of a group read the same files."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut = ()) -> torch.Tensor:
        """Return the part `cut` of the tensor `name`, converted to `dtype`; `shape` is that of the whole tensor.

        Raises: LoadError, if it is missing, has another shape, or has no floating-point numbers.
        """

    def blocks(self, name: str, shape: tuple[int, ...], cut: Cut = ()) -> BlockRows | None:
        """Return the part `cut` of a quantised tensor in its blocks, with the rows in the order of `take`.

        None: the tensor is not quantised, or `cut` divides a block.

        Raises: LoadError, when it is missing or has another shape.
        """

    def integers(self, name: str) -> torch.Tensor:
        """Return a whole one-dimensional tensor as int64. Raises: LoadError, when it is missing or has no integers."""

    def __contains__(self, name: str) -> bool: ...

    def digest(self, config: bytes) -> str:
        """Return the SHA-256 of config.json, and of every tensor's name, shape, dtype, and first, middle and last row.
        All ranks of a group have the same one, however the tensors are cut for them."""


def sampled_rows(shape: Sequence[int]) -> list[slice]:
    """Return the rows of a tensor that its digest covers: all of a vector, three of a matrix. Other weights differ in
    nearly every number, so three rows tell them apart without reading the files."""
    if not shape or not shape[0]:
        return []
    if len(shape) == 1:
        return [slice(0, shape[0])]
    return [slice(row, row + 1) for row in sorted({0, shape[0] // 2, shape[0] - 1})]


def raw_bytes(values: torch.Tensor) -> memoryview:
    """Return the memory of a tensor's values."""
    return values.contiguous().view(-1).view(torch.uint8).numpy().data


def missing_tensor(name: str) -> LoadError:
    return LoadError(f"the checkpoint has no tensor {name}; download the model again, all of its files")


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises: LoadError, if the shapes differ."""
    if found != wanted:
        raise LoadError(
            f"tensor {name} is {list(found)}, but config.json says {list(wanted)}; the files do not belong together"
        )
