"""One step's rows as the flat arrays that the model computes on."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.acceptance import Places
from services.worker.backends.native.kernels.attention import TILE
from services.worker.batch import Rows


@dataclass(frozen=True)
class Batch:
    """Tokens of all rows back to back, and the rows cut into tiles of queries that share their key blocks."""

    slots: torch.Tensor
    """int32[tokens]"""
    positions: torch.Tensor
    """int32[tokens]"""
    tiles: torch.Tensor
    """int32[tiles, 4]: slot, first position, first token, tokens"""
    num_tiles: int
    longest: int
    """Positions of the longest row, those before this step included."""
    widest: int
    """Tokens of the largest tile."""
    sampled: torch.Tensor
    """int64[sampled tokens]: of each row that samples its last token, and those before its drafts."""

    @classmethod
    def of(cls, rows: Rows) -> "Batch":
        """`rows` is not empty."""
        counts, first = rows.counts, np.cumsum(rows.counts, dtype=np.int32) - rows.counts
        total = int(counts.sum())
        offset = np.arange(total, dtype=np.int32) - np.repeat(first, counts)
        positions = np.repeat(rows.starts, counts) + offset
        last, drafts = (first + counts - 1)[rows.samples], rows.drafts[rows.samples]
        sampled = last if not drafts.any() else Places.of(last, last - drafts, drafts).positions
        return cls(
            slots=torch.from_numpy(np.repeat(rows.slots, counts)),
            positions=torch.from_numpy(positions),
            tiles=torch.from_numpy(tiles := _tiles(rows, first)),
            num_tiles=len(tiles),
            longest=int(rows.ends.max()),
            widest=int(tiles[:, 3].max()),
            sampled=torch.from_numpy(sampled.astype(np.int64)),
        )


def _tiles(rows: Rows, first: NDArray[np.int32]) -> NDArray[np.int32]:
    number = -(-rows.counts // TILE)
    row = np.repeat(np.arange(len(number)), number)
    skip = (np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)) * TILE
    columns = (
        rows.slots[row],
        rows.starts[row] + skip,
        first[row] + skip,
        np.minimum(rows.counts[row] - skip, TILE),
    )
    return np.stack(columns, axis=1).astype(np.int32)
