"""The outcome of a step's sampling as one message to other ranks: tokens, counts and drafts."""

from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.batch.slots import I32, Rows


class Outcome(NamedTuple):
    """Tokens and drafts of the sampling rows, in the plan's order."""

    ids: torch.Tensor
    """int32[sum(counts)], rows back to back"""
    counts: I32
    """int32[rows]"""
    drafts: I32
    """int32[rows, k]: drafts for the next step"""

    @staticmethod
    def empty_message(rows: Rows, k: int) -> torch.Tensor:
        """Return int32[sampling rows, 1 + most tokens of a row + k] to fill. Every rank derives this shape from the
        plan."""
        most = 1 + int(rows.drafts.max())
        return torch.zeros(int(np.count_nonzero(rows.samples)), 1 + most + k, dtype=torch.int32)

    def select(self, stays: NDArray[np.bool_]) -> Self:
        """Return the outcome of the rows in `stays`, bool[rows]."""
        tokens = torch.from_numpy(np.repeat(stays, self.counts))
        return type(self)(self.ids[tokens], self.counts[stays], self.drafts[stays])

    def to_message(self, message: torch.Tensor) -> torch.Tensor:
        columns, k = message.numpy(), self.drafts.shape[1]
        most = columns.shape[1] - 1 - k
        columns[:, 0] = self.counts
        columns[:, 1 : 1 + most][np.arange(most) < self.counts[:, None]] = self.ids.numpy()
        columns[:, 1 + most :] = self.drafts
        return message

    @classmethod
    def from_message(cls, message: torch.Tensor, k: int) -> Self:
        columns = message.numpy()
        most, counts = columns.shape[1] - 1 - k, columns[:, 0].copy()
        ids = columns[:, 1 : 1 + most][np.arange(most) < counts[:, None]]
        return cls(torch.from_numpy(ids), counts, columns[:, 1 + most :].copy())
