"""Prepared weights: matrix products and vectors of tokens."""

from collections.abc import Callable

import torch
from torch.nn import functional

from services.worker.kernels.quantized_weight import QuantizedWeight, Weight

_CONVERTED_ROWS = 512
"""Rows of a weight in another dtype that are converted at a time, so that the head's stay in the processor's cache."""


class Linear:
    """A product y = x W^T + b with prepared weights."""

    num_bytes: int
    """Memory of the weights."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, activations: torch.dtype) -> None:
        self._activations = activations
        self._weight = weight if isinstance(weight, QuantizedWeight) else weight.to(activations)
        self._bias = bias if bias is None else bias.to(activations)
        self.num_bytes = self._weight.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Map activations[rows, in] to [rows, out], in the dtype of the activations or in float32.

        Returns: `out`.
        """
        weight, kind = self._weight, out.dtype
        if isinstance(weight, QuantizedWeight):
            weight = weight.dequantized().to(self._activations)
        x, bias = x.to(kind), self._bias if self._bias is None else self._bias.to(kind)
        most = len(weight) if weight.dtype == kind else _CONVERTED_ROWS
        for first in range(0, len(weight), most):
            rows = slice(first, first + most)
            part = functional.linear(x, weight[rows].to(kind), bias if bias is None else bias[rows])
            out[:, rows].copy_(part)
        return out


class EmbeddingTable:
    """Vectors of tokens.

    Args:
        gather: of the network
        weight: is not packed
    """

    weight: Weight | None = None
    """None where the vectors are kept in another layout."""
    num_bytes: int

    def __init__(self, gather: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], weight: Weight) -> None:
        self._gather, self.weight, self.num_bytes = gather, weight, weight.nbytes

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = vector of token index[i] in float32; int32[rows], float32[rows, width]."""
        if isinstance(self.weight, torch.Tensor):
            self._gather(index, self.weight, out)
        else:
            assert self.weight is not None, "vectors in another layout are looked up by a class of their own"
            out.copy_(self.weight.select(index.long()))
