"""The rows of a step in plain Python."""

import numpy as np
import torch

from services.worker.batch.row_check import CountRows, count_rows
from services.worker.batch.slots import Rows
from services.worker.kernels.host_history import HostHistory, place_masks
from services.worker.kernels.interface.arrays import I32
from services.worker.kernels.interface.rows import BatchTensors, SettledRows, SlotDrafts, Verified


class ReferenceRows(HostHistory):
    """`RowKernels`"""

    tile = 8
    count_rows: CountRows = staticmethod(count_rows)
    place_masks = staticmethod(place_masks)

    def spread(self, counts: I32) -> tuple[I32, I32]:
        owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        firsts = np.cumsum(counts, dtype=np.int32) - counts
        return owners, np.arange(len(owners), dtype=np.int32) - firsts[owners]

    def settle(self, rows: Rows, drafts: SlotDrafts, history: torch.Tensor) -> tuple[SettledRows | None, int]:
        frontiers = drafts.frontier.numpy()[rows.slots]
        early = np.flatnonzero(frontiers > rows.starts)
        if len(early):
            return None, int(early[0])
        starts = np.where(frontiers >= 0, frontiers, rows.starts)
        number = np.minimum(rows.drafts, drafts.proposed.numpy()[rows.slots])
        counts = rows.counts - rows.drafts + number
        ends = starts + counts
        for slot, end, proposed in zip(rows.slots.tolist(), ends.tolist(), number.tolist(), strict=True):
            inside = history[slot, end - proposed : end]  # what is beyond the history is no step's input
            inside.copy_(drafts.tokens[slot, : len(inside)])
            drafts.frontier[slot], drafts.proposed[slot] = end, 0
        return SettledRows(starts, counts, number), -1

    def lay_out(
        self, rows: Rows, history: torch.Tensor | None, vocab_size: int, batch: BatchTensors
    ) -> tuple[int, int]:
        token = tiles = sampled = 0
        columns = (rows.slots, rows.starts, rows.counts, rows.samples, rows.drafts)
        for slot, start, count, samples, drafts in zip(*(c.tolist() for c in columns), strict=True):
            here = slice(token, token + count)
            batch.slots[here], batch.positions[here] = slot, torch.arange(start, start + count)
            if history is not None:
                ids = batch.ids[here] = history[slot, start : start + count]
                if len(missing := ((ids < 0) | (ids >= vocab_size)).nonzero()):
                    position = start + int(missing[0])
                    raise RuntimeError(f"slot {slot} is computed at position {position}, which has no token")
            for first in range(0, count, self.tile):
                tile = [slot, start + first, token + first, min(count - first, self.tile)]
                batch.tiles[tiles] = torch.tensor(tile)
                tiles += 1
            token += count
            if samples:
                batch.sampled[sampled : sampled + 1 + drafts] = torch.arange(token - 1 - drafts, token)
                sampled += 1 + drafts
        return tiles, sampled

    def verify(
        self, slots: I32, firsts: I32, drafts: I32, acceptable: I32, ids: torch.Tensor, history: torch.Tensor
    ) -> Verified:
        drafted = np.minimum(drafts, acceptable)
        counts, stays = np.empty(len(slots), np.int32), np.zeros(len(ids), np.bool_)
        begins = np.cumsum(drafts + 1) - drafts - 1
        for row, (slot, first, begin) in enumerate(zip(slots, firsts, begins, strict=True)):
            tokens = history[slot, first : first + drafted[row]]
            equal = (tokens == ids[begin : begin + len(tokens)]).tolist()
            counts[row] = 1 + (equal.index(False) if False in equal else len(equal))
            stays[begin : begin + counts[row]] = True
        return Verified(counts, drafted, stays)
