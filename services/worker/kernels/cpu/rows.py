"""The rows of a step, by compiled functions."""

import torch

from services.worker.batch.row_check import CountRows
from services.worker.batch.slots import Rows
from services.worker.kernels.cpu.compiled import rows as compiled
from services.worker.kernels.cpu.compiled.attention import TILE
from services.worker.kernels.interface.arrays import I32
from services.worker.kernels.interface.rows import (
    BatchTensors,
    PlacedMasks,
    RowKernels,
    SettledRows,
    SlotDrafts,
    Verified,
)

_NO_HISTORY = torch.empty(0, 0, dtype=torch.int32).numpy()


class CpuRows(RowKernels):
    tile = TILE
    count_rows: CountRows = staticmethod(compiled.count_rows)

    def write_tokens(self, history: torch.Tensor, slots: I32, positions: I32, ids: torch.Tensor) -> None:
        compiled.write_tokens(history.numpy(), slots, positions, ids.numpy())

    def spread(self, counts: I32) -> tuple[I32, I32]:
        owners, offsets = compiled.spread(counts)
        return owners, offsets

    def settle(self, rows: Rows, drafts: SlotDrafts, history: torch.Tensor) -> tuple[SettledRows | None, int]:
        planned = rows.slots, rows.starts, rows.counts, rows.drafts
        state = (tensor.numpy() for tensor in drafts)
        *columns, bad = compiled.settle(*planned, *state, history.numpy())
        return (SettledRows(*columns) if bad < 0 else None), bad

    def lay_out(
        self, rows: Rows, history: torch.Tensor | None, vocab_size: int, batch: BatchTensors
    ) -> tuple[int, int]:
        columns = rows.slots, rows.starts, rows.counts, rows.samples, rows.drafts
        tokens = _NO_HISTORY if history is None else history.numpy()
        written = (tensor.numpy() for tensor in batch)
        tiles, sampled = compiled.lay_out(*columns, tokens, vocab_size, TILE, *written)
        if tiles < 0:
            slot, position = int(batch.slots[sampled]), int(batch.positions[sampled])
            raise RuntimeError(f"slot {slot} is computed at position {position}, which has no token")
        return tiles, sampled

    def place_masks(self, slots: I32, drafts: I32, masked: I32, counts: I32) -> PlacedMasks:
        return PlacedMasks(*compiled.place_masks(slots, drafts, masked, counts))

    def verify(
        self, slots: I32, firsts: I32, drafts: I32, acceptable: I32, ids: torch.Tensor, history: torch.Tensor
    ) -> Verified:
        return Verified(*compiled.verify(slots, firsts, drafts, acceptable, ids.numpy(), history.numpy()))
