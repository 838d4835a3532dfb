"""The rows of a step, by compiled functions."""

from dataclasses import replace

import torch

from services.worker.batch.row_check import CountRows
from services.worker.batch.slots import Rows
from services.worker.kernels.cpu.compiled import rows as compiled
from services.worker.kernels.cpu.compiled.attention import TILE
from services.worker.kernels.cpu.compiled.tile_attention import QUERIES
from services.worker.kernels.interface.rows import RowKernels, SlotDrafts
from services.worker.kernels.selection import TILES


class CpuRows(RowKernels):
    """`own`: see `KernelChoice`."""

    count_rows: CountRows = staticmethod(compiled.count_rows)
    loops = compiled

    def __init__(self, own: str | None = None) -> None:
        self.tile = QUERIES if own == TILES else TILE

    def settle(self, rows: Rows, drafts: SlotDrafts, history: torch.Tensor) -> tuple[Rows | None, int]:
        planned = rows.slots, rows.starts, rows.counts, rows.drafts
        starts, counts, number, bad = compiled.settle(*planned, *drafts, history.numpy())
        return (replace(rows, starts=starts, counts=counts, drafts=number) if bad < 0 else None), bad
