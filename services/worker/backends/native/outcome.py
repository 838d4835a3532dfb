"""What a step decided of its rows, as other ranks learn it: one message of tokens, counts and drafts."""

from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

I32 = NDArray[np.int32]


class Outcome(NamedTuple):
    """Of the rows that sample, in the plan's order."""

    ids: torch.Tensor
    """int64[sum(counts)], rows back to back"""
    counts: I32
    """int32[rows]"""
    drafts: I32
    """int32[rows, k]: for the next step"""

    @staticmethod
    def message(rows: int, most: int, k: int) -> torch.Tensor:
        """int32[rows, 1 + most + k], to be filled; `most` tokens of a row. Every rank knows the shape from the plan."""
        return torch.zeros(rows, 1 + most + k, dtype=torch.int32)

    def where(self, stay: NDArray[np.bool_]) -> Self:
        """That of some of the rows, bool[rows]."""
        tokens = torch.from_numpy(np.repeat(stay, self.counts))
        return type(self)(self.ids[tokens], self.counts[stay], self.drafts[stay])

    def write(self, message: torch.Tensor) -> torch.Tensor:
        """Returns the message."""
        columns, k = message.numpy(), self.drafts.shape[1]
        most = columns.shape[1] - 1 - k
        columns[:, 0] = self.counts
        columns[:, 1 : 1 + most][np.arange(most) < self.counts[:, None]] = self.ids.numpy()
        columns[:, 1 + most :] = self.drafts
        return message

    @classmethod
    def read(cls, message: torch.Tensor, k: int) -> Self:
        columns = message.numpy()
        most, counts = columns.shape[1] - 1 - k, columns[:, 0].copy()
        ids = columns[:, 1 : 1 + most][np.arange(most) < counts[:, None]]
        return cls(torch.from_numpy(ids.astype(np.int64)), counts, columns[:, 1 + most :].copy())
