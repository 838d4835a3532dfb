"""Deferred updates of a drafter: while no drafts are proposed, hidden states are stored and passed on in bulk.

The hidden states of a step are valid only during the step. Processing those of one token costs a drafter as much as a
draft; processing many tokens at once costs little more than one. Adaptive speculation that proposes no drafts therefore
costs almost nothing.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.drafters.base import Advance, Drafter, Proposer, States
from services.worker.batch.slots import I32, BatchColumns

MOST_TOKENS = 1024
"""Maximum number of stored tokens. The step that passes them on has about the extra work of a chunk of a prompt."""
MOST_BYTES = 8 << 20
"""Maximum size of the stored hidden states, bytes. Enough for bulk processing with a large model."""

BoolRows = NDArray[np.bool_]
_NO_SLOTS, _NO_ROWS = np.empty(0, np.int32), np.empty(0, np.bool_)


def deferred(drafter: Drafter) -> Drafter:
    """Let a drafter get steps without drafts together with the next step that has some, or when many are kept."""
    return replace(drafter, start=lambda slots: DeferredProposer(drafter.start(slots), slots.table))


class DeferredProposer(Proposer):
    def __init__(self, proposer: Proposer, table: BatchColumns) -> None:
        self._proposer, self._table = proposer, table
        self._kept: list[Advance] = []
        """In the order of the steps, with copies of the states."""
        self._tokens = 0
        """Number of stored tokens."""
        self._most = 0
        """Maximum number of stored tokens; 0 until the size of a token's states is known."""

    def assign(self, slot: int) -> None:
        self._proposer.assign(slot)

    def rest(self) -> bool:
        if self._kept:
            self._keep([])
        return self._proposer.rest()

    def propose(self, advance: Advance, k: int) -> I32:
        tokens = len(advance.states[0])
        if k == 0 and self._has_room(tokens, advance.states):
            self._kept.append(advance._replace(states=[states.clone() for states in advance.states]))
            self._tokens += tokens
            return np.empty((np.count_nonzero(advance.samples), 0), np.int32)
        if self._kept:
            advance = self._joined([*self._kept, advance], advance.slots, advance.samples)
            self._keep([])
        return self._proposer.propose(advance, k)

    def _has_room(self, tokens: int, states: States) -> bool:
        """Return whether the states of `tokens` more tokens fit. If they do not, drop those of requests that have left;
        they then fit if at least half of the memory is free."""
        if not self._most:
            self._most = min(MOST_TOKENS, MOST_BYTES // sum(each[:1].nbytes for each in states))
        if self._tokens + tokens <= self._most:
            return True
        if self._kept:
            self._keep([self._joined(self._kept)])
        return self._tokens + tokens <= self._most // 2

    def _keep(self, kept: list[Advance]) -> None:
        self._kept, self._tokens = kept, sum(len(advance.states[0]) for advance in kept)

    def _joined(self, advances: list[Advance], last: I32 = _NO_SLOTS, samples: BoolRows = _NO_ROWS) -> Advance:
        """One row per request that still has its slot, from its first stored position on. The blocks of other requests
        may be reused already. The slots `last` come first, in their order and with `samples`, bool[rows]."""
        slots, generations, starts, counts = map(np.concatenate, zip(*(each[:4] for each in advances), strict=True))
        generation = self._table.generation
        stays = generations == generation[slots]
        order = np.concatenate((last, np.setdiff1d(slots[stays], last)))
        place = np.empty(len(generation), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        # Rows of requests that have left come last and are removed
        places = np.where(stays, place[slots], len(order))
        firsts = np.unique(places, return_index=True)[1][: len(order)]
        by_token = np.repeat(places, counts)
        joined = np.bincount(by_token, minlength=len(order))[: len(order)].astype(np.int32)
        tokens = torch.from_numpy(np.argsort(by_token, kind="stable")[: joined.sum()])
        return Advance(
            order,
            generations[firsts],
            starts[firsts],
            joined,
            np.concatenate((samples, np.zeros(len(order) - len(samples), np.bool_))),
            [torch.cat(each)[tokens] for each in zip(*(each.states for each in advances), strict=True)],
            advances[-1].min_acceptance,
        )
