"""Weights in the layout of the kernels: one copy, from which products are computed and vectors are looked up."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from services.worker.kernels.cpu.compiled.block_formats import FORMATS, KINDS, PANEL
from services.worker.kernels.cpu.compiled.coded_product import format_table
from services.worker.kernels.cpu.compiled.quantized import (
    GROUP,
    pack_kernel,
    pack_layout,
    rows_kernel,
)
from services.worker.kernels.cpu.launching import Launcher


@dataclass(frozen=True)
class Panels:
    """Layouts: see `compiled.quantized`. Outputs are padded to a multiple of `BLOCK`."""

    BLOCK = 4 * PANEL

    format: NDArray[np.int64] | None
    """See `format_table`. None: bfloat16."""
    outputs: int
    inputs: int
    memory: torch.Tensor
    """uint8[panels, blocks, bytes of a block]"""

    @classmethod
    def from_plain(cls, weight: torch.Tensor) -> "Panels":
        outputs, inputs = weight.shape
        padded = functional.pad(weight.to(torch.bfloat16), (0, -inputs % GROUP, 0, -outputs % cls.BLOCK))
        panels = padded.unflatten(1, (-1, GROUP // 2, 2)).unflatten(0, (-1, PANEL))
        memory = panels.permute(0, 2, 3, 1, 4).contiguous().view(torch.uint8).flatten(2).flatten(2)
        return cls(None, outputs, inputs, memory)

    @classmethod
    def from_blocks(cls, kind: str, parts: Sequence[torch.Tensor]) -> "Panels":
        """`parts`: uint8[outputs, bytes of a row] of ggml's blocks, one below the other."""
        own, number = FORMATS[kind], KINDS.index(kind)
        rows = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
        outputs, blocks = sum(map(len, rows)), rows[0].shape[1] // own.source_bytes
        rows.append(torch.zeros(-outputs % cls.BLOCK, rows[0].shape[1], dtype=torch.uint8))
        addresses = torch.cat([part.data_ptr() + torch.arange(len(part)) * part.stride(0) for part in rows])
        memory = torch.empty(len(addresses) // PANEL, blocks, own.bytes, dtype=torch.uint8)
        layout = pack_layout(number)
        values = addresses.data_ptr(), memory.data_ptr(), blocks, layout.ctypes.data
        pack_kernel().again().run(len(memory), values)
        return cls(format_table(number), outputs, blocks * own.inputs, memory)

    @property
    def format_address(self) -> int:
        return 0 if self.format is None else self.format.ctypes.data

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes


class PanelEmbedding:
    """`EmbeddingTable` in panels. A tied head uses the same panels."""

    tensor: torch.Tensor | None = None

    def __init__(self, launcher: Launcher, panels: Panels) -> None:
        self._launcher, self.panels, self.num_bytes = launcher, panels, panels.num_bytes
        self._kernel = rows_kernel(panels.format is not None)

    def __len__(self) -> int:
        return self.panels.outputs

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        panels = self.panels
        addresses = panels.memory.data_ptr(), index.data_ptr(), out.data_ptr()
        values = (*addresses, panels.inputs, out.stride(0), panels.format_address)
        self._launcher.launch(self._kernel, index, values)
