"""Proposals of drafts: n-gram lookup and the rounds of a draft head."""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.kernels.interface.arrays import F32, I32
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


class DraftingKernels(Protocol):
    """Proposals of tokens."""

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
        ...

    def lay_out(
        self, rows: DraftRows, history: torch.Tensor, limits: DraftLimits, tensors: DraftTensors
    ) -> DraftLayout:
        """Write the places of a step's tokens without their hidden states, each with the token after it, and the rows
        that have room for drafts."""
        ...

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
        ...
