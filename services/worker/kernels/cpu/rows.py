"""The rows of a step, by compiled functions."""

import torch

from services.worker.batch.row_check import CountRows
from services.worker.batch.slots import Rows
from services.worker.kernels.cpu.compiled import rows as compiled
from services.worker.kernels.cpu.compiled.attention import TILE
from services.worker.kernels.interface.rows import RowKernels, SettledRows, SlotDrafts


class CpuRows(RowKernels):
    tile = TILE
    count_rows: CountRows = staticmethod(compiled.count_rows)
    loops = compiled

    def settle(self, rows: Rows, drafts: SlotDrafts, history: torch.Tensor) -> tuple[SettledRows | None, int]:
        planned = rows.slots, rows.starts, rows.counts, rows.drafts
        state = (tensor.numpy() for tensor in drafts)
        *columns, bad = compiled.settle(*planned, *state, history.numpy())
        return (SettledRows(*columns) if bad < 0 else None), bad
