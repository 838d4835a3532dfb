"""The grammar masks of one step, matched with the tokens that it samples."""

from typing import NamedTuple, Self

import numpy as np

from protocol.columns import has_all, has_any
from protocol.rows import GrammarRows
from protocol.steps import GrammarOutput
from services.worker.batch.slots import I32, spread


class GrammarMask(NamedTuple):
    """The masks of one step's sampled tokens."""

    rows: I32
    """int32[masks]: which of the tokens"""
    words: I32
    """int32[masks, ceil(vocab / 32)], least significant bit first"""
    acceptable: I32
    """int32[sampling rows]: drafts that may be accepted"""

    @classmethod
    def from_message(cls, grammar: GrammarOutput, slots: I32, drafts: I32, vocab_size: int) -> Self:
        """`slots` and `drafts` are those of the sampling rows, at least one; masks of other slots are not used.

        Raises: ProtocolError
        """
        masked, counts, words = GrammarRows.from_message(grammar, vocab_size)
        tokens, acceptable = place_masks(slots, drafts, masked, counts)
        used = tokens >= 0
        return cls(tokens[used], words[used], acceptable)


def place_masks(slots: I32, drafts: I32, masked: I32, counts: I32) -> tuple[I32, I32]:
    """Match the masks of a step with its sampled tokens: one for each row and one for each of its drafts.

    Args:
        slots, drafts: int32[sampling rows], at least one
        masked, counts: int32[constrained rows]: slots, and numbers of masks; a slot without a row has no token

    Returns: int32[masks], the sampled token that each is for, -1: none; int32[sampling rows], drafts that may be
        accepted, none where their masks are missing (acceptable drafts, docs/invariants.md).
    """
    order = np.argsort(slots).astype(np.int32)
    rows = order[np.searchsorted(slots, masked, sorter=order).clip(max=len(slots) - 1)]
    rows[slots[rows] != masked] = -1
    if not has_any(drafts) and has_all(counts == 1):  # most steps
        return rows, drafts
    used = np.where(rows < 0, 0, np.minimum(counts, drafts[rows] + 1))
    acceptable = drafts.copy()
    acceptable[rows[rows >= 0]] = used[rows >= 0] - 1
    firsts, (owners, offsets) = np.cumsum(drafts + 1, dtype=np.int32) - drafts - 1, spread(counts)
    return np.where(offsets < used[owners], firsts[rows[owners]] + offsets, np.int32(-1)), acceptable
