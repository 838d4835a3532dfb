"""Prepared weights: matrix products and vectors of tokens."""

from typing import Protocol

import torch


class Linear(Protocol):
    """A product y = x W^T + b with prepared weights."""

    num_bytes: int
    """Memory of the weights."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Map activations[rows, in] to activations[rows, out].

        Returns: the result: `out` with float32 activations; otherwise a library may have allocated it.
        """
        ...


class EmbeddingTable(Protocol):
    """Vectors of tokens."""

    tensor: torch.Tensor | None
    """[tokens, width]; None where they are kept in another layout."""
    num_bytes: int

    def __len__(self) -> int:
        """The number of tokens."""
        ...

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = vector of token index[i] in float32; int32[rows], float32[rows, width]."""
        ...
