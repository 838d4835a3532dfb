"""y = x W^T + b. A row has the same bits in a batch of any size (batch invariance, docs/invariants.md)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from services.worker.kernels.cpu.compiled import coded_product, pair_product, product, tile_product
from services.worker.kernels.cpu.compiled.product import BLOCK, PANEL
from services.worker.kernels.cpu.compiled.quantized import float32_rows_kernel
from services.worker.kernels.cpu.launching import Launcher
from services.worker.kernels.cpu.panels import OUTPUTS, PAIRED, format_address
from services.worker.kernels.cpu.thread_team import Kernel
from services.worker.kernels.packed_weight import PackedRows
from services.worker.kernels.selection import PAIRS, TILES


@dataclass(frozen=True)
class Float32Way:
    """A kernel of float32 products, and how it wants its weights."""

    kernel: Callable[[bool, int], Kernel]
    """For weights in bfloat16 or float32, and the number of inputs."""
    chunk: int
    """Rows of one item."""
    panel: int
    """Outputs whose weights are side by side, input after input."""
    apart: int
    """Distance of the two bfloat16 that share a word."""
    rows: Callable[[bool], Kernel]
    """For weights in bfloat16 or float32: looks up the weights of outputs."""


NARROW = Float32Way(
    partial(product.product_kernel, False), product.CHUNK, PANEL, PANEL // 2, partial(float32_rows_kernel, False)
)
WIDE = Float32Way(
    partial(product.product_kernel, True), product.WIDE_CHUNK, BLOCK, PANEL, partial(float32_rows_kernel, True)
)
"""With AVX-512."""

FLOAT32 = "float32 products"
"""Layout of `float32_product`. Its memory is of a dtype and a way."""


def float32_panels(weight: torch.Tensor, way: Float32Way) -> PackedRows:
    """Return a weight for `float32_product`.

    A weight whose numbers are exact in bfloat16 is stored in bfloat16: half the bytes to read, and the same sums.
    """
    outputs, inputs = weight.shape
    short = weight.to(torch.bfloat16)
    half = torch.equal(short.to(weight.dtype), weight)
    padded = functional.pad(short if half else weight.float(), (0, 0, 0, -outputs % BLOCK))
    panels = padded.view(-1, way.panel, inputs).transpose(1, 2)
    if half:
        panels = panels.unflatten(2, (-1, 2, way.apart)).transpose(3, 4)
    return PackedRows(FLOAT32, outputs, inputs, panels.contiguous())


class PanelProduct:
    """A product with weights in panels, which an embedding may use too.

    Args:
        kernel: for a number of inputs
        block: outputs of one item of the kernel
        chunk: rows of one item
        more: arguments of the kernel that others do not have
    """

    def __init__(
        self,
        launcher: Launcher,
        panels: PackedRows,
        bias: torch.Tensor | None,
        kernel: Callable[[int], Kernel],
        block: int,
        chunk: int,
        more: tuple[int, ...] = (),
    ) -> None:
        self._launcher, self._panels, self._chunk, self._more = launcher, panels, chunk, more
        self.num_bytes, self.outputs = panels.memory.nbytes, panels.outputs
        self._blocks = -(-panels.outputs // block)
        self._bias = _padded(bias, panels.outputs, OUTPUTS)
        self._kernel = kernel(panels.inputs)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        panels = self._panels
        addresses = x.data_ptr(), panels.memory.data_ptr(), self._bias.data_ptr(), out.data_ptr()
        values = (*addresses, len(x), panels.inputs, panels.outputs, out.stride(0), *self._more)
        self._launcher.launch(self._kernel, x, values, self._blocks, self._chunk, "rows")
        return out


def float32_product(launcher: Launcher, weight: PackedRows, bias: torch.Tensor | None, way: Float32Way) -> PanelProduct:
    """A product with float32 activations."""
    kernel = partial(way.kernel, weight.memory.dtype == torch.bfloat16)
    return PanelProduct(launcher, weight, bias, kernel, BLOCK, way.chunk)


class StackedProduct:
    """Products of the same inputs, whose outputs are side by side."""

    def __init__(self, parts: Sequence[PanelProduct]) -> None:
        self._parts, self.num_bytes = parts, sum(part.num_bytes for part in parts)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        first = 0
        for part in self._parts:
            part(x, out[:, first : first + part.outputs])
            first += part.outputs
        return out


def coded_panel_product(launcher: Launcher, panels: PackedRows, bias: torch.Tensor | None, half: bool) -> PanelProduct:
    """A product with quantised weights. `half`: activations are bfloat16, and not float32."""
    kernel, sizes = coded_product.coded_product_kernel, (coded_product.BLOCK, coded_product.CHUNK)
    return PanelProduct(launcher, panels, bias, kernel, *sizes, (format_address(panels), int(half)))


def tile_panel_product(launcher: Launcher, panels: PackedRows, bias: torch.Tensor | None) -> PanelProduct:
    """A product with bfloat16 activations, computed with AMX."""
    kernel, sizes = (
        partial(tile_product.tile_product_kernel, panels.layout != PAIRED),
        (tile_product.BLOCK, tile_product.CHUNK),
    )
    return PanelProduct(launcher, panels, bias, kernel, *sizes, (format_address(panels), 1))


def pair_panel_product(launcher: Launcher, panels: PackedRows, bias: torch.Tensor | None) -> PanelProduct:
    """A product with bfloat16 activations, computed with AVX-512."""
    if panels.layout != PAIRED:
        return coded_panel_product(launcher, panels, bias, half=True)
    kernel = pair_product.pair_product_kernel
    return PanelProduct(launcher, panels, bias, kernel, pair_product.BLOCK, pair_product.CHUNK)


OWN_BFLOAT16 = {TILES: tile_panel_product, PAIRS: pair_panel_product}
"""Our own products with bfloat16 activations, by the feature of the processor that they need."""


def _padded(bias: torch.Tensor | None, outputs: int, block: int) -> torch.Tensor:
    start = torch.zeros(outputs) if bias is None else bias.float()
    return functional.pad(start, (0, -outputs % block))
