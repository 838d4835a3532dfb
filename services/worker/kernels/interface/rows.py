"""The rows of a step: layout, true positions and verification of drafts."""

from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import I32
from services.worker.batch.row_check import CountRows, count_rows
from services.worker.batch.slots import Rows, spread
from services.worker.kernels.interface import row_loops

_NO_HISTORY = np.empty((0, 0), np.int32)


class BatchTensors(NamedTuple):
    """The tokens of a step, row after row; the tensors may be longer."""

    ids: torch.Tensor
    """int32[tokens]"""
    slots: torch.Tensor
    """int32[tokens]"""
    positions: torch.Tensor
    """int32[tokens]"""
    tiles: torch.Tensor
    """int32[tiles, 4]: slot, first position, first token, tokens. The queries of a tile share their keys."""
    sampled: torch.Tensor
    """int32[sampled]: indices of the tokens whose logits are needed: one per sampling row and one per draft"""


class SlotDrafts(NamedTuple):
    """Drafts and true positions of all slots, which the host has on every device."""

    frontier: I32
    """int32[slots]: start of the next row; EMPTY before the first"""
    proposed: I32
    """int32[slots]: number of drafts for the next row"""
    tokens: I32
    """int32[slots, most]: these drafts"""


class Verified(NamedTuple):
    """int32[rows] unless stated."""

    counts: I32
    """Accepted drafts and one more token."""
    drafted: I32
    """Drafts that could have been accepted."""
    stays: NDArray[np.bool_]
    """bool[tokens]: sampled tokens that count."""


class RowKernels:
    """The rows of a step: their positions, and the drafts that are accepted."""

    tile = 8
    """Maximum number of tokens in a tile."""
    count_rows: CountRows = staticmethod(count_rows)
    """The check of a plan's rows on the host; for any thread."""
    loops: ModuleType = row_loops
    """The loops over rows, or a module with their compiled forms."""

    def write_prompt(self, history: torch.Tensor, slot: int, tokens: I32) -> None:
        """Write the first tokens of a slot to `history`, int32[slots, limit]."""
        history.numpy()[slot, : len(tokens)] = tokens

    def write_tokens(self, history: torch.Tensor, slots: I32, positions: I32, ids: torch.Tensor) -> None:
        """Write int32[tokens] ids at their positions. Those beyond the limit of the history are skipped."""
        self.loops.write_tokens(history.numpy(), slots, positions, ids.numpy())

    def read_tokens(self, history: torch.Tensor, slots: I32, positions: I32) -> torch.Tensor:
        """Return the ids at `positions` of `slots`, int32[tokens]."""
        return torch.from_numpy(history.numpy()[slots, positions])

    def settle(self, rows: Rows, drafts: SlotDrafts, history: torch.Tensor) -> tuple[Rows | None, int]:
        """Bring rows to their true positions, each with the drafts that its slot has, and write these drafts to
        `history`, int32[slots, limit]. The slots have no drafts afterwards, and their frontiers are the rows' ends.

        Returns: the rows and -1; or None and the first row that is planned before its frontier, with nothing changed.
        """
        frontier, proposed, tokens = drafts
        here = frontier[rows.slots]
        early = np.flatnonzero(here > rows.starts)
        if len(early):
            return None, int(early[0])
        starts = np.where(here >= 0, here, rows.starts)
        number = np.minimum(rows.drafts, proposed[rows.slots])
        counts = rows.counts - rows.drafts + number
        ends = starts + counts
        owners, offsets = spread(number)
        if len(owners):
            slots = rows.slots[owners]
            ids = self.upload(tokens[slots, offsets])
            self.write_tokens(history, slots, (ends - number)[owners] + offsets, ids)
        frontier[rows.slots], proposed[rows.slots] = ends, 0
        return replace(rows, starts=starts, counts=counts, drafts=number), -1

    def upload(self, ids: I32) -> torch.Tensor:
        """Return int32[tokens] ids on the device."""
        return torch.from_numpy(ids)

    def lay_out(
        self, rows: Rows, history: torch.Tensor | None, vocab_size: int, batch: BatchTensors
    ) -> tuple[int, int]:
        """Write the tokens of all rows. Their ids are read from `history`, int32[slots, limit], if there is one.

        Returns: number of tiles and number of sampled tokens.

        Raises: RuntimeError, if the history has no token of the vocabulary at a position (valid ids); only where the
            host reads the device's memory.
        """
        columns = rows.slots, rows.starts, rows.counts, rows.samples, rows.drafts
        tokens = _NO_HISTORY if history is None else history.numpy()
        written = (tensor.numpy() for tensor in batch)
        tiles, sampled = self.loops.lay_out(*columns, tokens, vocab_size, self.tile, *written)
        if tiles < 0:
            slot, position = int(batch.slots[sampled]), int(batch.positions[sampled])
            raise RuntimeError(f"slot {slot} is computed at position {position}, which has no token")
        return tiles, sampled

    def verify(
        self, slots: I32, firsts: I32, drafts: I32, acceptable: I32, ids: torch.Tensor, history: torch.Tensor
    ) -> Verified:
        """Compare sampled tokens with drafts.

        Args:
            slots, firsts, drafts, acceptable: int32[rows]; at most `acceptable` drafts are accepted
            ids: int32[sum(drafts + 1)], sampled tokens
            history: int32[slots, limit], with the drafts from position `firsts` on
        """
        return Verified(*self.loops.verify(slots, firsts, drafts, acceptable, ids.numpy(), history.numpy()))
