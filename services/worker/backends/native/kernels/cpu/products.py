"""y = x W^T + b: in float32 by our own kernel, in bfloat16 by oneDNN.

In float32 a row has the same bits in a batch of any size (batch invariance, docs/invariants.md).
"""

import torch
from torch.nn import functional

from services.worker.backends.native.kernels.cpu.compiled.product import BLOCK, CHUNK, PANEL, product_kernel
from services.worker.backends.native.kernels.cpu.launching import Launcher

_PRODUCT = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001  torch has no public product with a packed weight


class Float32Product:
    """A product with float32 activations.

    The weight is kept in bfloat16 if it has no more digits than that: half the bytes to read, and the same sum.
    """

    def __init__(self, launcher: Launcher, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._launcher = launcher
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

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        addresses = x.data_ptr(), self._weight.data_ptr(), self._bias.data_ptr(), out.data_ptr()
        values = (*addresses, len(x), self._inputs, self._outputs)
        self._launcher.launch(self._kernel, x, values, self._blocks, CHUNK, "rows")
        return out


class OneDnnProduct:
    """A product with bfloat16 activations. oneDNN allocates the result."""

    def __init__(self, launcher: Launcher, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._launcher = launcher
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)  # noqa: SLF001  as above
        self._bias = bias
        self._outputs = len(weight)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._launcher.call(self._multiply, x, out, in_place=False)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self._outputs)
        result: torch.Tensor = _PRODUCT(x, self._weight, self._bias, "none", [], "")
        return result
