"""The rows of a step, by compiled functions."""

import torch

from services.worker.batch.row_check import CountRows
from services.worker.batch.slots import Rows
from services.worker.kernels.cpu.compiled import rows as compiled
from services.worker.kernels.cpu.compiled.attention import TILE
from services.worker.kernels.interface.arrays import I32
from services.worker.kernels.interface.rows import PlacedMasks, RowKernels, SettledRows, SlotDrafts


class CpuRows(RowKernels):
    tile = TILE
    count_rows: CountRows = staticmethod(compiled.count_rows)
    loops = compiled

    def spread(self, counts: I32) -> tuple[I32, I32]:
        owners, offsets = compiled.spread(counts)
        return owners, offsets

    def settle(self, rows: Rows, drafts: SlotDrafts, history: torch.Tensor) -> tuple[SettledRows | None, int]:
        planned = rows.slots, rows.starts, rows.counts, rows.drafts
        state = (tensor.numpy() for tensor in drafts)
        *columns, bad = compiled.settle(*planned, *state, history.numpy())
        return (SettledRows(*columns) if bad < 0 else None), bad

    def place_masks(self, slots: I32, drafts: I32, masked: I32, counts: I32) -> PlacedMasks:
        return PlacedMasks(*compiled.place_masks(slots, drafts, masked, counts))
