"""y = x W^T + b with the weight ordered once for oneDNN.

In float32 the ordered product also gives a row the same bits in a batch of any size, which `F.linear` does not: equal
answers rest on it. Processors without bfloat16 arithmetic get the bfloat16 weights in float32, exactly: on such a
machine `F.linear` in bfloat16 takes three to seven times as long.
"""

import torch
from torch.nn import functional as F

_PRODUCT = torch.ops.mkldnn._linear_pointwise.default


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN orders weights of `dtype` on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def activation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the matrix products of a model in `dtype` compute in on this machine."""
    return dtype if _packs(dtype) else torch.float32


class Linear:
    """A matrix product with a weight [out, in] and a bias [out] or none, both taken over and freed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias, self._packed = bias, _packs(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] to [rows, out]."""
        if self._packed:
            return _PRODUCT(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)
