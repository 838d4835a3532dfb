"""A step's grammar bitmask on the rows it constrains."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.rows import GrammarRows
from protocol.steps import GrammarOutput

I32 = NDArray[np.int32]


class GrammarMask(NamedTuple):
    """The masks of one step's sampled tokens."""

    rows: I32
    """int32[masks]: which of the tokens"""
    words: I32
    """int32[masks, ceil(vocab / 32)], least significant bit first"""
    acceptable: I32
    """int32[sampling rows]: drafts that may be accepted; none where their masks are missing (acceptable drafts,
    docs/invariants.md)."""

    @classmethod
    def from_message(cls, grammar: GrammarOutput, slots: I32, drafts: I32, vocab_size: int) -> Self:
        """`slots` and `drafts` are those of the sampling rows; masks of other slots are not used.

        Raises: ProtocolError
        """
        constrained, counts, masks = GrammarRows.from_message(grammar, vocab_size)
        order = np.argsort(slots, kind="stable")
        found = order[np.searchsorted(slots, constrained, sorter=order).clip(max=len(slots) - 1)]
        here = slots[found] == constrained
        acceptable = drafts.copy()
        acceptable[found[here]] = np.minimum(drafts[found[here]], counts[here] - 1)
        first = np.cumsum(drafts + 1) - drafts - 1
        owners = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(masks)) - np.repeat(np.cumsum(counts) - counts, counts)
        used = here[owners] & (offsets <= drafts[found[owners]])
        rows = first[found[owners[used]]] + offsets[used]
        return cls(rows.astype(np.int32), masks[used], acceptable)
