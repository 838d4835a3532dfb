"""Matrix products in float32."""

import torch
from torch.nn import functional

from services.worker.backends.native.kernels.product import BLOCK, CHUNK, PANEL, product_kernel
from services.worker.backends.native.kernels.sequence import Sequence


class Product:
    """y = x W^T + b, float32 in and out; a row has the same bits in a batch of any size.

    The weight is kept in bfloat16 if it has no more digits than that: half the bytes to read, and the same sum. For one
    calling thread.

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
        panels = padded.view(-1, PANEL, self._inputs).transpose(1, 2)
        if half:  # number i beside number i + 8: `simd.load_bf16_pairs`
            panels = panels.unflatten(2, (2, PANEL // 2)).transpose(2, 3)
        self._weight = panels.contiguous()
        start = torch.zeros(self._outputs) if bias is None else bias.float()
        self._bias = functional.pad(start, (0, missing))
        self._kernel = product_kernel(half, self._inputs)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32[rows, in], contiguous, to float32[rows, out]."""
        rows = x.shape[0]
        out = torch.empty(rows, self._outputs)
        values = self._values(x.data_ptr(), out.data_ptr(), rows)
        self._kernel.run(self._blocks * -(-rows // CHUNK), values, self._blocks * rows)
        return out

    def follow(self, sequence: Sequence, x: int, out: int) -> None:
        """Becomes the next of `sequence`; x and out are addresses of such rows."""
        sequence.add(self._kernel, self._values(x, out, 0), self._blocks, CHUNK, "rows")

    def _values(self, x: int, out: int, rows: int) -> tuple[int, ...]:
        weight, bias = self._weight.data_ptr(), self._bias.data_ptr()
        return x, weight, bias, out, rows, self._inputs, self._outputs
