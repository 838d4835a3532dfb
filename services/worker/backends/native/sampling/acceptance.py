"""Which drafts are accepted: those that equal what the sampler itself draws at their position.

Every position of a row is sampled as it would be without drafts: the same parameters, the same noise, the history of
confirmed tokens and the drafts before it. The first token that differs from its draft replaces it; one more token
follows the last draft. With proposals of single tokens that is the standard rule of accepting and recovering, so it
keeps the distribution, and every token and log-probability equals the one without speculation.
"""

from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import has_any
from services.worker.batch.slots import I32, spread
from services.worker.kernels.interface.rows import RowKernels, Verified


class SamplePositions(NamedTuple):
    """The tokens to sample in one step, those of a row back to back; int32[tokens] unless stated."""

    slots: I32
    positions: I32
    drafts: I32
    """int32[rows]: how many of each row's tokens have a draft; one more has none."""
    offsets: I32
    """Number of each token in its row."""

    @classmethod
    def from_rows(cls, slots: I32, firsts: I32, drafts: I32) -> Self:
        """int32[rows] each; `firsts` are the positions of each row's first token."""
        if not has_any(drafts):
            return cls(slots, firsts, drafts, np.zeros(len(slots), np.int32))
        owners, offsets = spread(drafts + np.int32(1))
        return cls(slots[owners], firsts[owners] + offsets, drafts, offsets)

    def accept(self, kernels: RowKernels, ids: torch.Tensor, history: torch.Tensor, acceptable: I32) -> Verified:
        """Compare int32[tokens] sampled ids with the drafts in int32[slots, limit] `history`; of each row at most
        int32[rows] `acceptable` drafts are accepted."""
        drafts = self.drafts
        if len(ids) == len(drafts):
            return Verified(np.ones(len(drafts), np.int32), drafts, np.ones(len(drafts), np.bool_))
        rows = self.offsets == 0
        return kernels.verify(self.slots[rows], self.positions[rows], drafts, acceptable, ids, history)

    def keep(self, accepted: Verified, kept: NDArray[np.bool_]) -> Verified:
        """Drop the tokens of the rows that are not in bool[rows] `kept`."""
        stays = accepted.stays & np.repeat(kept, self.drafts + 1)
        return Verified(accepted.counts * kept, accepted.drafted * kept, stays)
