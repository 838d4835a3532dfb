"""One step's rows as the flat arrays that the model computes on."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.acceptance import Places
from services.worker.backends.native.kernels.attention import TILE
from services.worker.backends.native.kernels.ragged import spread
from services.worker.batch.slots import Rows


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
        owners, offsets = spread(counts)
        positions = rows.starts[owners] + offsets
        last, drafts = (first + counts - 1)[rows.samples], rows.drafts[rows.samples]
        sampled = last if not drafts.any() else Places.of(last, last - drafts, drafts).positions
        return cls(
            slots=torch.from_numpy(rows.slots[owners]),
            positions=torch.from_numpy(positions),
            tiles=torch.from_numpy(tiles := _tiles(rows, first)),
            num_tiles=len(tiles),
            longest=int(rows.ends.max()),
            widest=int(tiles[:, 3].max()),
            sampled=torch.from_numpy(sampled.astype(np.int64)),
        )


def _tiles(rows: Rows, first: NDArray[np.int32]) -> NDArray[np.int32]:
    row, number = spread(-(-rows.counts // np.int32(TILE)))
    skip = number * np.int32(TILE)
    columns = (
        rows.slots[row],
        rows.starts[row] + skip,
        first[row] + skip,
        np.minimum(rows.counts[row] - skip, TILE),
    )
    return np.stack(columns, axis=1)
