"""A step's grammar bitmask on the rows it constrains."""

from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import GrammarOutput
from services.worker.backends.native.kernels.rules import mask_kernel

I32 = NDArray[np.int32]


class Mask(NamedTuple):
    """Of one step's sampling rows."""

    rows: I32
    """int32[constrained rows]"""
    words: I32
    """int32[constrained rows, ceil(vocab / 32)], least significant bit first"""

    @classmethod
    def of(cls, grammar: GrammarOutput, slots: I32, vocab_size: int) -> Self:
        """`slots` are those of the sampling rows; what the grammar says of others is nobody's.

        Raises: RuntimeError, when the bitmask has another shape.
        """
        constrained, words = unpack(grammar.slots), unpack(grammar.bitmask)
        width = -(-vocab_size // 32)
        if len(words) != len(constrained) * width:
            raise RuntimeError(
                f"step {grammar.step_id}: a bitmask of {len(words)} words for {len(constrained)} rows, "
                f"which need {width} each"
            )
        order = np.argsort(slots, kind="stable")
        found = order[np.searchsorted(slots, constrained, sorter=order).clip(max=len(slots) - 1)]
        here = slots[found] == constrained
        masks = words.reshape(-1, width)[here]
        return cls(found[here].astype(np.int32), masks)


class Masker:
    """For one calling thread."""

    def __init__(self) -> None:
        self._kernel = mask_kernel()

    def apply(self, logits: torch.Tensor, mask: Mask) -> None:
        """Leaves those rows of float32[rows, vocab] only the tokens whose bit is set, in place. The grammar wins where
        nothing else allows any of them: then the lowest is taken."""
        rows, words = mask
        if len(rows):
            addresses = rows.ctypes.data, words.ctypes.data
            self._kernel.run(len(rows), (logits.data_ptr(), logits.shape[1], *addresses))
