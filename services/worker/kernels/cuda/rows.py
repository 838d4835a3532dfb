"""The rows of a step: the host's columns are uploaded, tokens stay on the device."""

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from protocol.columns import I32
from services.worker.batch.slots import Rows, spread
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cuda.attention import TILE
from services.worker.kernels.cuda.compiled.layout import layout_kernel
from services.worker.kernels.cuda.graph_plan import padded_rows
from services.worker.kernels.interface.rows import BatchTensors, RowKernels, Verified

_AT_ONCE = 256
MOST_APART = 16
"""Tokens of the largest step whose drafts do not share the reading of their keys, so that it replays a graph."""


class CudaRows(RowKernels):
    tile = TILE

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device

    # -- the token history -----------------------------------------------------------------------------------------

    def write_prompt(self, history: torch.Tensor, slot: int, tokens: I32) -> None:
        history[slot, : len(tokens)].copy_(self.upload(tokens))

    def write_tokens(self, history: torch.Tensor, slots: I32, positions: I32, ids: torch.Tensor) -> None:
        limit, inside = history.shape[1], np.flatnonzero(positions < history.shape[1])
        columns = [_places(slots[inside], positions[inside], limit)]
        if not len(inside):
            return
        if len(inside) < len(slots):
            columns.append(inside)
        places, *kept = self._device.upload(*columns)
        history.view(-1).scatter_(0, places, ids.index_select(0, kept[0]) if kept else ids)

    def upload(self, ids: I32) -> torch.Tensor:
        return self._device.upload(ids)[0]

    def read_tokens(self, history: torch.Tensor, slots: I32, positions: I32) -> torch.Tensor:
        (places,) = self._device.upload(_places(slots, positions, history.shape[1]))
        return history.view(-1).index_select(0, places)

    # -- a step ----------------------------------------------------------------------------------------------------

    def lay_out(
        self, rows: Rows, history: torch.Tensor | None, vocab_size: int, batch: BatchTensors
    ) -> tuple[int, int]:
        """Ids are not checked, because the host does not wait for them. Padding rows follow (graph_plan.py)."""
        slots, positions, tiles, sampled = _columns_of(rows, len(batch.tiles))
        counts = len(slots), len(tiles), len(sampled)
        buffers = batch.ids, batch.slots, batch.positions, batch.tiles, batch.sampled
        kinds = batch.slots, batch.tiles, batch.sampled
        padded = [padded_rows(number, len(buffer)) for number, buffer in zip(counts, kinds, strict=True)]
        reads = history is not None
        columns = self._device.upload(slots, positions, tiles.reshape(-1), sampled)
        limit = 0 if history is None else history.shape[1]
        grid = (triton.cdiv(max(padded[0], 4 * padded[1], padded[2], 1), _AT_ONCE),)
        layout_kernel[grid](
            *(*columns, batch.ids if history is None else history, *buffers, *counts, *padded, limit),
            reads=reads,
            at_once=_AT_ONCE,
        )
        return counts[1], counts[2]

    def verify(
        self, slots: I32, firsts: I32, drafts: I32, acceptable: I32, ids: torch.Tensor, history: torch.Tensor
    ) -> Verified:
        """Waits for the device: the host plans with the number of accepted drafts."""
        drafted = np.minimum(drafts, acceptable)
        most = np.minimum(drafted, history.shape[1] - firsts).clip(min=0).astype(np.int32)
        owners, offsets = spread(most)
        begins = np.cumsum(drafts + 1) - drafts - 1
        places = _places(slots[owners], firsts[owners] + offsets, history.shape[1])
        sampled, expected = self._device.upload(begins[owners] + offsets, places)
        here = ids.index_select(0, sampled) == history.view(-1).index_select(0, expected)
        (equal,) = self._device.download(here)()
        counts = np.ones(len(slots), np.int32)
        firsts_of = np.cumsum(most) - most
        for row in np.flatnonzero(most).tolist():
            matches = equal[firsts_of[row] : firsts_of[row] + most[row]]
            counts[row] += int(matches.argmin()) if not matches.all() else len(matches)
        stays = np.arange(len(ids)) - np.repeat(begins, drafts + 1) < np.repeat(counts, drafts + 1)
        return Verified(counts, drafted, stays)


def _places(slots: I32, positions: I32, limit: int) -> NDArray[np.int64]:
    """int64[tokens]: indices in a flat history."""
    return slots.astype(np.int64) * limit + positions


def _columns_of(rows: Rows, most_tiles: int) -> tuple[I32, I32, I32, I32]:
    """Slot and position of each token, int32[tokens]; the columns of `_tiles_of` and `_sampled_of`.

    Tiles have one token, if all rows decode: a graph computes these (graph_plan.py).
    """
    if (rows.counts == 1).all() and not rows.drafts.any():  # most steps, for which the host has the least time
        numbers, slots = np.arange(len(rows.slots), dtype=np.int32), np.ascontiguousarray(rows.slots)
        tiles = np.stack((slots, rows.starts, numbers, np.ones_like(numbers)), 1)
        return slots, np.ascontiguousarray(rows.starts), tiles, numbers[rows.samples]
    owners, offsets = spread(rows.counts)
    apart = (rows.counts == rows.drafts + 1).all() and len(owners) <= min(most_tiles, MOST_APART)
    tiles = _tiles_of(rows, 1 if apart else TILE)
    return rows.slots[owners], rows.starts[owners] + offsets, tiles, _sampled_of(rows)


def _tiles_of(rows: Rows, size: int) -> I32:
    """int32[tiles, 4], see `BatchTensors`. `size`: most tokens of a tile"""
    owners, offsets = spread(-(-rows.counts // size))
    firsts, offsets = np.cumsum(rows.counts) - rows.counts, offsets * size
    counts = np.minimum(rows.counts[owners] - offsets, size)
    columns = rows.slots[owners], rows.starts[owners] + offsets, firsts[owners] + offsets, counts
    return np.stack(columns, 1).astype(np.int32)


def _sampled_of(rows: Rows) -> I32:
    """int32[sampled]: indices of the last token of each sampling row, and of its drafts."""
    drafts = rows.drafts[rows.samples]
    owners, offsets = spread(drafts + np.int32(1))
    ends = np.cumsum(rows.counts)[rows.samples]
    return (ends[owners] - 1 - drafts[owners] + offsets).astype(np.int32)
