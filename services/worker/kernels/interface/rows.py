"""The rows of a step: layout, true positions and verification of drafts."""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.batch.row_check import CountRows
from services.worker.batch.slots import Rows
from services.worker.kernels.interface.arrays import I32


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
    """Drafts and true positions of all slots."""

    frontier: torch.Tensor
    """int32[slots]: start of the next row; EMPTY before the first"""
    proposed: torch.Tensor
    """int32[slots]: number of drafts for the next row"""
    tokens: torch.Tensor
    """int32[slots, most]: these drafts"""


class SettledRows(NamedTuple):
    """int32[rows] each."""

    starts: I32
    counts: I32
    drafts: I32


class PlacedMasks(NamedTuple):
    tokens: I32
    """int32[masks]: the sampled token that each is for; -1: none"""
    acceptable: I32
    """int32[sampling rows]: drafts that may be accepted; none where their masks are missing (acceptable drafts,
    docs/invariants.md)"""


class Verified(NamedTuple):
    """int32[rows] unless stated."""

    counts: I32
    """Accepted drafts and one more token."""
    drafted: I32
    """Drafts that could have been accepted."""
    stays: NDArray[np.bool_]
    """bool[tokens]: sampled tokens that count."""


class RowKernels(Protocol):
    """The rows of a step: their positions, and the drafts that are accepted."""

    tile: int
    """Maximum number of tokens in a tile."""
    count_rows: CountRows
    """The check of a plan's rows on the host; for any thread."""

    def spread(self, counts: I32) -> tuple[I32, I32]:
        """Return the row of each token and its index in the row, int32[tokens] each. `counts`: int32[rows], tokens."""
        ...

    def write_prompt(self, history: torch.Tensor, slot: int, tokens: I32) -> None:
        """Write the first tokens of a slot to `history`, int32[slots, limit]."""
        ...

    def write_tokens(self, history: torch.Tensor, slots: I32, positions: I32, ids: torch.Tensor) -> None:
        """Write int32[tokens] ids at their positions. Those beyond the limit of the history are skipped."""
        ...

    def read_tokens(self, history: torch.Tensor, slots: I32, positions: I32) -> torch.Tensor:
        """Return the ids at `positions` of `slots`, int32[tokens]."""
        ...

    def settle(self, rows: Rows, drafts: SlotDrafts, history: torch.Tensor) -> tuple[SettledRows | None, int]:
        """Bring rows to their true positions, each with the drafts that its slot has, and write these drafts to
        `history`, int32[slots, limit]. The slots have no drafts afterwards, and their frontiers are the rows' ends.

        Returns: the rows and -1; or None and the first row that is planned before its frontier, with nothing changed.
        """
        ...

    def lay_out(
        self, rows: Rows, history: torch.Tensor | None, vocab_size: int, batch: BatchTensors
    ) -> tuple[int, int]:
        """Write the tokens of all rows. Their ids are read from `history`, int32[slots, limit], if there is one.

        Returns: number of tiles and number of sampled tokens.

        Raises: RuntimeError, if the history has no token of the vocabulary at a position (valid ids); only where the
            host reads the device's memory.
        """
        ...

    def place_masks(self, slots: I32, drafts: I32, masked: I32, counts: I32) -> PlacedMasks:
        """Match the masks of a step with its sampled tokens: one for each row and one for each of its drafts.

        Args:
            slots, drafts: int32[sampling rows]
            masked, counts: int32[constrained rows]: slots, and numbers of masks; a slot without a row has no token
        """
        ...

    def verify(
        self, slots: I32, firsts: I32, drafts: I32, acceptable: I32, ids: torch.Tensor, history: torch.Tensor
    ) -> Verified:
        """Compare sampled tokens with drafts.

        Args:
            slots, firsts, drafts, acceptable: int32[rows]; at most `acceptable` drafts are accepted
            ids: int32[sum(drafts + 1)], sampled tokens
            history: int32[slots, limit], with the drafts from position `firsts` on
        """
        ...
