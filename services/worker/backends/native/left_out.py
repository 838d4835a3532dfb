"""Which sampling rows of a step are sampled, on the rank that samples (left-out row, docs/invariants.md)."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import GrammarOutput
from services.worker.backends.mask_inbox import MaskInbox, joined
from services.worker.backends.native.step import ComputedStep


class RowsToSample(NamedTuple):
    grammar: GrammarOutput | None
    """Masks of the constrained ones; None: there are none."""
    kept: NDArray[np.bool_] | None
    """bool[sampling rows]: the rows that are not left out; None: all are sampled."""

    @classmethod
    def with_masks(cls, pending: ComputedStep, masks: MaskInbox) -> Self:
        """Wait for the step's masks as long as no other request is held back, then leave out the rows that have none.

        Raises: RanksLost, if the epoch ends meanwhile.
        """
        masked = unpack(pending.step.masked)
        if not len(masked):
            return cls(None, None)
        taken = masks.take(pending.step.step_id, masked)
        return cls(
            joined(taken.parts), ~np.isin(pending.slots, [*taken.left_out]) if taken.left_out else None
        )
