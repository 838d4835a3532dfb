"""y = x W^T + b. A row has the same bits in a batch of any size (batch invariance, docs/invariants.md)."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.worker.kernels.cpu.compiled import coded_product, pair_product, product, tile_product
from services.worker.kernels.cpu.compiled.block_formats import KINDS
from services.worker.kernels.cpu.compiled.tile_codes import tile_coder
from services.worker.kernels.cpu.launching import Launcher
from services.worker.kernels.cpu.panels import OUTPUTS, PAIRED, format_address
from services.worker.kernels.cpu.thread_team import Kernel
from services.worker.kernels.interface.products import Linear
from services.worker.kernels.packed_weight import PackedRows
from services.worker.kernels.selection import TILES, KernelChoice

FLOAT32 = "float32 products"
"""Layout of `float32_panels`. Its memory is of a dtype, and of the way of AVX-512 or of AVX2."""


def float32_panels(weight: torch.Tensor, wide: bool) -> PackedRows:
    """Return a weight for float32 activations. `wide`: see `product.product_kernel`.

    A weight whose numbers are exact in bfloat16 is stored in bfloat16: half the bytes to read, and the same sums.
    """
    (outputs, inputs), (width, apart) = weight.shape, product.panel_of(wide)
    short = weight.to(torch.bfloat16)
    half = torch.equal(short.to(weight.dtype), weight)
    padded = functional.pad(short if half else weight.float(), (0, 0, 0, -outputs % product.BLOCK))
    panels = padded.view(-1, width, inputs).transpose(1, 2)
    if half:
        panels = panels.unflatten(2, (-1, 2, apart)).transpose(3, 4)
    return PackedRows(FLOAT32, outputs, inputs, panels.contiguous())


class PanelProduct(Linear):
    """A product with weights in panels, which an embedding may use too."""

    def __init__(self, launcher: Launcher, panels: PackedRows, bias: torch.Tensor | None, choice: KernelChoice) -> None:
        self._launcher, self._panels = launcher, panels
        self.num_bytes, self.outputs = panels.memory.nbytes, panels.outputs
        self._kernel, block, self._chunk, self._more = _kernel_of(panels, choice)
        self._blocks = -(-panels.outputs // block)
        start = torch.zeros(panels.outputs) if bias is None else bias.float()
        self._starts = functional.pad(start, (0, -panels.outputs % OUTPUTS))

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        panels = self._panels
        addresses = x.data_ptr(), panels.memory.data_ptr(), self._starts.data_ptr(), out.data_ptr()
        sizes = len(x), panels.inputs, panels.outputs, out.stride(0), out.element_size()
        self._launcher.launch(self._kernel, x, (*addresses, *sizes, *self._more), self._blocks, self._chunk, "rows")
        return out


def _kernel_of(panels: PackedRows, choice: KernelChoice) -> tuple[Kernel, int, int, tuple[int, ...]]:
    """Return the kernel for a layout, outputs and rows of one of its items, and arguments that others do not have."""
    inputs = panels.inputs
    if panels.layout == FLOAT32:
        kernel = product.product_kernel(choice.wide, panels.memory.dtype == torch.bfloat16, inputs)
        return kernel, product.BLOCK, product.WIDE_CHUNK if choice.wide else product.CHUNK, ()
    coded = panels.layout != PAIRED
    if choice.own == TILES and not (coded and choice.few_rows):
        decoder = tile_product.decoder(KINDS.index(panels.layout)) if coded else (0, 0)
        kernel, block = tile_product.tile_product_kernel(coded, inputs), tile_product.block_of(coded)
        return kernel, block, tile_product.CHUNK, (format_address(panels), *decoder)
    if not coded:
        return pair_product.pair_product_kernel(inputs), pair_product.BLOCK, pair_product.CHUNK, ()
    tiles = tile_coder(KINDS.index(panels.layout)) if choice.own == TILES else 0
    more = format_address(panels), int(choice.own is not None), tiles
    return coded_product.coded_product_kernel(inputs), coded_product.BLOCK, coded_product.CHUNK, more


class StackedProduct(Linear):
    """Products of the same inputs, whose outputs are side by side."""

    def __init__(self, parts: Sequence[PanelProduct]) -> None:
        self._parts, self.num_bytes = parts, sum(part.num_bytes for part in parts)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        first = 0
        for part in self._parts:
            part(x, out[:, first : first + part.outputs])
            first += part.outputs
        return out
