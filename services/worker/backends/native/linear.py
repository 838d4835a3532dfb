"""y = x W^T + b, in float32 by our own kernel and in bfloat16 by oneDNN.

In float32 a row has the same bits in a batch of any size: equal answers rest on it. Processors without bfloat16
arithmetic compute the products of bfloat16 weights in float32, exactly: on such a machine `F.linear` in bfloat16 takes
three to seven times as long.
"""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from services.worker.backends.native.product import Product

_PRODUCT = torch.ops.mkldnn._linear_pointwise.default


def _packs() -> bool:
    """Whether oneDNN orders bfloat16 weights on this machine."""
    return bool(torch.backends.mkldnn.is_available()) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def activation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the matrix products of a model in `dtype` compute in on this machine."""
    return dtype if _packs() else torch.float32


class Linear:
    """A matrix product with a weight [out, in] and a bias [out] or none, both taken over and freed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._multiply = _chosen(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in], contiguous, to [rows, out]."""
        return self._multiply(x)


def _chosen(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if weight.dtype == torch.float32:
        return Product(weight, bias)
    if not _packs():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return lambda x: _PRODUCT(x, packed, bias, "none", [], "")
