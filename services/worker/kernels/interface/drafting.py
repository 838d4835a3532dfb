"""Proposals of drafts: n-gram lookup and the rounds of a draft head."""

from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import F32, I32
from protocol.steps import NO_DRAFT
from services.worker.kernels.interface import row_loops
from services.worker.kernels.interface.recording import Recording


class DraftTensors(NamedTuple):
    """Operands and results of a head that drafts one token per round, for all of its rounds."""

    # places: a token with the hidden state of the token before it
    slots: torch.Tensor
    """int32[places]"""
    positions: torch.Tensor
    """int32[places]"""
    ids: torch.Tensor
    """int32[places]"""
    hidden: torch.Tensor
    """float32[places, width]"""
    # rows that get drafts
    tiles: torch.Tensor
    """int32[rows, 4], as `BatchTensors` has them; one place each"""
    last: torch.Tensor
    """int32[rows]: place of each row"""
    yielded: torch.Tensor
    """float32[rows, width]: hidden state for the next round"""
    chosen: torch.Tensor
    """int32[rows]: draft id"""
    sure: torch.Tensor
    """float32[rows]: its probability"""
    sharpness: torch.Tensor
    """float32[rows]: for `most_likely`"""
    # per row, kept from round to round
    room: torch.Tensor
    """int32[rows]: maximum number of drafts"""
    owner: torch.Tensor
    """int32[rows]: row of the result"""
    chance: torch.Tensor
    """float32[rows]: probability of all of the row's drafts together"""


class DraftRows(NamedTuple):
    """The rows of a step whose tokens a head follows."""

    slots: I32
    starts: I32
    counts: I32
    samples: NDArray[np.bool_]
    num_blocks: I32
    """int32[slots]"""
    temperature: F32
    """float32[slots]"""
    block_size: int


class DraftLimits(NamedTuple):
    k: int
    """Maximum number of drafts of a row."""
    position: int
    """Drafts and computed places have positions below this one."""
    error: float
    """The head's own error, as a temperature."""


class DraftLayout(NamedTuple):
    """The first round of a draft."""

    places: int
    rows: int
    """Rows that get drafts."""


class DraftingKernels:
    """Proposals of tokens."""

    loops: ModuleType = row_loops
    """See `RowKernels.loops`."""

    def lookup(
        self, history: torch.Tensor, slots: I32, lengths: I32, sizes: range, k: int, min_acceptance: float
    ) -> I32:
        """Return the tokens that follow the longest earlier match of the sequence's end; among equally long matches the
        last one.

        If the sequence ends before k tokens are copied, the copy continues with the drafts. After a match of s
        tokens, each draft counts as accepted with probability s / (s + 1); a row ends where the product falls below
        `min_acceptance`.

        Args:
            history: int32[slots, limit]
            lengths: int32[rows], tokens of each sequence
            sizes: lengths of matches, ascending

        Returns: int32[rows, k], padded with NO_DRAFT.
        """
        found = np.full((len(slots), k), NO_DRAFT, np.int32)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            tokens = history[slot, :length].tolist()
            if (match := _longest_match(tokens, sizes)) is None:
                continue
            after, size = match
            chance = np.float32(1)
            for j in range(k):
                chance *= np.float32(size) / np.float32(size + 1)
                if chance < np.float32(min_acceptance):
                    break
                tokens.append(tokens[after + j])
                found[row, j] = tokens[-1]
        return found

    def lay_out(
        self, rows: DraftRows, history: torch.Tensor, limits: DraftLimits, tensors: DraftTensors
    ) -> DraftLayout:
        """Write the places of a step's tokens without their hidden states, each with the token after it, and the rows
        that have room for drafts."""
        *columns, block_size = rows
        t = tensors
        places = t.slots, t.positions, t.ids
        of_rows = t.last, t.room, t.owner, t.sharpness, t.chance, t.tiles
        written = (tensor.numpy() for tensor in (*places, *of_rows))
        return DraftLayout(*self.loops.lay_out_drafts(*columns, history.numpy(), block_size, *limits, *written))

    def draft(
        self,
        places: Recording[None],
        rows: Recording[None],
        tensors: DraftTensors,
        layout: DraftLayout,
        min_acceptance: float,
        tokens: torch.Tensor | None,
        proposed: I32,
    ) -> None:
        """Run the recordings alternately, over "places" and over "rows", once for each draft.

        Args:
            min_acceptance: a row ends where the probability of all its drafts together falls below this
            tokens: int32[draft vocabulary]: the token of each draft id; None: the same
            proposed: int32[any, k]: written where there are drafts
        """
        t, k, (num_places, num_rows) = tensors, proposed.shape[1], layout
        for number in range(max(k, 1)):
            places.run(places=num_places)
            if not num_rows or not k:
                return
            rows.run(rows=num_rows)
            chance = t.chance[:num_rows] * t.sure[:num_rows]
            likely = chance >= min_acceptance
            ids = t.chosen[:num_rows] if tokens is None else tokens[t.chosen[:num_rows].long()]
            proposed[t.owner[:num_rows][likely].numpy(), number] = ids[likely].numpy()
            going = (likely & (t.room[:num_rows] > number + 1)).nonzero()[:, 0]
            if number + 1 == k:
                return
            num_places = num_rows = _continue(t, going, ids[going], chance[going])


def _longest_match(tokens: list[int], sizes: range) -> tuple[int, int] | None:
    """Return the end and the size of the longest earlier occurrence of the last tokens; among equals the last one."""
    for size in reversed(sizes):
        for first in range(len(tokens) - size - 1, -1, -1):
            if tokens[first : first + size] == tokens[-size:]:
                return first + size, size
    return None


def _continue(t: DraftTensors, going: torch.Tensor, ids: torch.Tensor, chance: torch.Tensor) -> int:
    """Make rows `going` the rows and the places of the next round, with the tokens drafted last; returns how many."""
    left = len(going)
    for column in (t.room, t.owner, t.sharpness):
        column[:left] = column[going]
    t.chance[:left], t.ids[:left], t.hidden[:left] = chance, ids, t.yielded[going]
    at = torch.arange(left, dtype=torch.int32)
    t.slots[:left], t.positions[:left], t.last[:left] = t.tiles[going, 0], t.tiles[going, 1] + 1, at
    t.tiles[:left] = torch.stack((t.slots[:left], t.positions[:left], at, torch.ones(left, dtype=torch.int32)), 1)
    return left
