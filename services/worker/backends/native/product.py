"""Matrix products of few rows: what a drafter computes one token at a time."""

import torch
from torch.nn import functional

from services.worker.backends.native.kernels.product import BLOCK, product_kernel


class Product:
    """Like `linear.Linear`, but float32 in and out, and at its best with a handful of rows.

    The weight is kept in bfloat16 if it has no more digits than that: a row is then half the bytes and the same sum.
    For one calling thread.

    Args:
        weight: [out, in]
        bias: [out], or none
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._outputs, self._inputs = weight.shape
        missing = -self._outputs % BLOCK
        short = weight.to(torch.bfloat16)
        half = torch.equal(short.to(weight.dtype), weight)
        padded = functional.pad(short if half else weight.float(), (0, 0, 0, missing))
        self._blocks = len(padded) // BLOCK
        self._weight = padded.view(self._blocks, BLOCK, self._inputs).transpose(1, 2).contiguous()
        start = torch.zeros(self._outputs) if bias is None else bias.float()
        self._bias = functional.pad(start, (0, missing))
        self._kernel = product_kernel(half)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32[rows, in], contiguous, to float32[rows, out]."""
        rows = x.shape[0]
        out = torch.empty(rows, self._outputs)
        addresses = x.data_ptr(), self._weight.data_ptr(), self._bias.data_ptr(), out.data_ptr()
        self._kernel.run(self._blocks, (*addresses, rows, self._inputs, self._outputs))
        return out
