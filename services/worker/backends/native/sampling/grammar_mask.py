"""A step's grammar bitmask on the rows it constrains."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.rows import GrammarRows
from protocol.steps import GrammarOutput
from services.worker.backends.native.kernels.interface.rows import RowKernels

I32 = NDArray[np.int32]


class GrammarMask(NamedTuple):
    """The masks of one step's sampled tokens."""

    rows: I32
    """int32[masks]: which of the tokens"""
    words: I32
    """int32[masks, ceil(vocab / 32)], least significant bit first"""
    acceptable: I32
    """int32[sampling rows]: drafts that may be accepted"""

    @classmethod
    def from_message(
        cls, kernels: RowKernels, grammar: GrammarOutput, slots: I32, drafts: I32, vocab_size: int
    ) -> Self:
        """`slots` and `drafts` are those of the sampling rows; masks of other slots are not used.

        Raises: ProtocolError
        """
        masked, counts, words = GrammarRows.from_message(grammar, vocab_size)
        tokens, acceptable = kernels.place_masks(slots, drafts, masked, counts)
        used = tokens >= 0
        return cls(tokens[used], words[used], acceptable)
