"""A step's grammar bitmask on the rows it constrains."""

from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.rows import GrammarRows
from protocol.steps import GrammarOutput
from services.worker.backends.native.kernels.rules import mask_kernel

I32 = NDArray[np.int32]


class Mask(NamedTuple):
    """Of one step's sampled tokens."""

    rows: I32
    """int32[masks]: which of the tokens"""
    words: I32
    """int32[masks, ceil(vocab / 32)], least significant bit first"""
    acceptable: I32
    """int32[sampling rows]: drafts that may be accepted. None where their masks are missing (spec 2(b) 14)."""

    @classmethod
    def of(cls, grammar: GrammarOutput, slots: I32, drafts: I32, vocab_size: int) -> Self:
        """`slots` and `drafts` are those of the sampling rows; what the grammar says of others is nobody's.

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


class Masker:
    """For one calling thread."""

    def __init__(self) -> None:
        self._kernel = mask_kernel()

    def apply(self, logits: torch.Tensor, mask: Mask) -> None:
        """Leaves those rows of float32[rows, vocab] only the tokens whose bit is set, in place. The grammar wins where
        nothing else allows any of them: then the lowest is taken."""
        rows, words, _ = mask
        if len(rows):
            addresses = rows.ctypes.data, words.ctypes.data
            self._kernel.run(len(rows), (logits.data_ptr(), logits.shape[1], *addresses))
