"""Vectors of tokens."""

import torch

from services.worker.backends.native.kernels.cpu.compiled.quantized import rows_kernel
from services.worker.backends.native.kernels.cpu.launching import Launcher
from services.worker.backends.native.kernels.cpu.panels import Panels


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
