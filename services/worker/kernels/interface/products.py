"""Prepared weights: matrix products and vectors of tokens."""

from typing import Protocol

import torch
from torch.nn import functional

from services.worker.kernels.quantized_weight import QuantizedWeight, Weight


class Linear(Protocol):
    """A product y = x W^T + b with prepared weights."""

    num_bytes: int
    """Memory of the weights."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Map activations[rows, in] to activations[rows, out].

        Returns: `out`.
        """
        ...


class EmbeddingTable(Protocol):
    """Vectors of tokens."""

    num_bytes: int

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = vector of token index[i] in float32; int32[rows], float32[rows, width]."""
        ...


class PlainLinear:
    """`Linear`"""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, activations: torch.dtype) -> None:
        self._activations = activations
        self._weight = weight if isinstance(weight, QuantizedWeight) else weight.to(activations)
        self._bias = bias if bias is None else bias.to(activations)
        self.num_bytes = self._weight.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        if isinstance(weight, QuantizedWeight):
            weight = weight.dequantized().to(self._activations)
        return out.copy_(functional.linear(x, weight, self._bias))
