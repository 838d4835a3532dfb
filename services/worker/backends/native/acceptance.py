"""Which drafts are accepted: those that are what the sampler itself draws at their position.

Every position of a row is sampled as it would be without drafts: the same parameters, the same noise, the history of
confirmed tokens and the drafts before it. The first token that differs from its draft replaces it; behind the last
draft comes one more. With proposals of single tokens that is the standard rule of accepting and recovering, so it
keeps the distribution, and every token and log-probability is the one that there would be without speculation.
"""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from services.worker.backends.native.kernels.ragged import spread, verify
from services.worker.backends.native.state import TokenHistory

I32 = NDArray[np.int32]


class Places(NamedTuple):
    """The tokens to sample in one step, those of a row back to back; int32[tokens] unless stated."""

    slots: I32
    positions: I32
    drafts: I32
    """int32[rows]: how many of each row's tokens have a draft; one more has none."""
    offsets: I32
    """Of each token in its row."""

    @classmethod
    def of(cls, slots: I32, firsts: I32, drafts: I32) -> Self:
        """int32[rows] each; `firsts` are the positions of each row's first token."""
        if not drafts.any():
            return cls(slots, firsts, drafts, np.zeros(len(slots), np.int32))
        owners, offsets = spread(drafts + np.int32(1))
        return cls(slots[owners], firsts[owners] + offsets, drafts, offsets)


class Accepted(NamedTuple):
    """What verification came to; int32[rows] unless stated."""

    counts: I32
    """Tokens: the drafts that were accepted and one more."""
    drafted: I32
    """Drafts that could have been accepted."""
    tokens: NDArray[np.bool_]
    """bool[tokens] of `Places`: those that count."""


def accept(places: Places, ids: I32, history: TokenHistory, acceptable: I32) -> Accepted:
    """Args:
    ids: int32[tokens], what was sampled
    history: has the drafts
    acceptable: int32[rows], how many of each row's drafts may be accepted
    """
    drafts = places.drafts
    if len(ids) == len(drafts):
        return Accepted(np.ones(len(drafts), np.int32), drafts, np.ones(len(drafts), np.bool_))
    rows = places.offsets == 0
    columns = places.slots[rows], places.positions[rows], drafts, acceptable
    return Accepted(*verify(*columns, ids, history.array))
