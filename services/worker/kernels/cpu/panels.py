"""Weights in the layout of the kernels: one copy, from which products are computed and vectors are looked up."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from services.worker.kernels.cpu.compiled.block_formats import FORMATS, KINDS, PANEL
from services.worker.kernels.cpu.compiled.coded_product import format_table
from services.worker.kernels.cpu.compiled.quantized import GROUP, pack_kernel, pack_layout
from services.worker.kernels.cpu.launching import Launcher
from services.worker.kernels.cpu.thread_team import Kernel
from services.worker.kernels.interface.products import EmbeddingTable
from services.worker.kernels.packed_weight import PackedRows

OUTPUTS = 4 * PANEL
"""Outputs are padded to a multiple of this."""
PAIRED = "bfloat16 pairs"
"""Layout of bfloat16; others are named after the types in ggml. See `compiled.quantized`; the memory is uint8[panels,
blocks, bytes of a block]."""


def paired_panels(weight: torch.Tensor) -> PackedRows:
    outputs, inputs = weight.shape
    padded = functional.pad(weight.to(torch.bfloat16), (0, -inputs % GROUP, 0, -outputs % OUTPUTS))
    panels = padded.unflatten(1, (-1, GROUP // 2, 2)).unflatten(0, (-1, PANEL))
    memory = panels.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8).flatten(2).flatten(2)
    return PackedRows(PAIRED, outputs, inputs, memory)


def coded_panels(kind: str, parts: Sequence[torch.Tensor]) -> PackedRows:
    """`parts`: uint8[outputs, bytes of a row] of ggml's blocks, one below the other."""
    own = FORMATS[kind]
    rows = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
    outputs, blocks = sum(map(len, rows)), rows[0].shape[1] // own.source_bytes
    rows.append(torch.zeros(-outputs % OUTPUTS, rows[0].shape[1], dtype=torch.uint8))
    addresses = torch.cat([part.data_ptr() + torch.arange(len(part)) * part.stride(0) for part in rows])
    memory = torch.empty(len(addresses) // PANEL, blocks, own.bytes, dtype=torch.uint8)
    layout = pack_layout(KINDS.index(kind))
    values = addresses.data_ptr(), memory.data_ptr(), blocks, layout.ctypes.data
    pack_kernel().run(len(memory), values)
    return PackedRows(kind, outputs, blocks * own.inputs, memory)


def format_address(panels: PackedRows) -> int:
    """Return the address of the layout's `format_table`; 0 of weights that are not quantised."""
    return format_table(KINDS.index(panels.layout)).ctypes.data if panels.layout in KINDS else 0


class PanelEmbedding(EmbeddingTable):
    """Vectors in panels. A tied head uses the same panels.

    Args:
        kernel: looks up outputs of this layout
    """

    def __init__(self, launcher: Launcher, panels: PackedRows, kernel: Kernel) -> None:
        self._launcher, self.panels, self.num_bytes = launcher, panels, panels.memory.nbytes
        self._kernel, self._format = kernel, format_address(panels)

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        panels = self.panels
        addresses = panels.memory.data_ptr(), index.data_ptr(), out.data_ptr()
        values = (*addresses, panels.inputs, out.stride(0), self._format)
        self._launcher.launch(self._kernel, index, values)
