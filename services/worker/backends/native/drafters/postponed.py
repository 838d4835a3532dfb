"""While nobody wants drafts, a drafter need not follow every step: what it has to read is kept and read in bulk.

Hidden states are there only in the step that computes them. One token at a time they cost a drafter as much as a draft;
many at once cost little more than one. So as long as few or none of the drafts would be accepted, speculation that is
switched down to nothing costs next to nothing.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.drafters.base import I32, Advance, Drafter, Slots, States
from services.worker.batch.slots import SlotTable

MOST_TOKENS = 1024
"""That are kept: the step that reads them at last must not be much longer than one with a chunk of a prompt."""
MOST_BYTES = 8 << 20
"""Of their hidden states, which lie beside the cache: enough of a large model's to be read in bulk."""

Mask = NDArray[np.bool_]
NOBODY, NONE = np.empty(0, np.int32), np.empty(0, np.bool_)


class Postponed(Drafter):
    """`drafter`, which hears of steps without drafts when it is asked for some, or when they have become many."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.reads, self.bytes_per_block = drafter.reads, drafter.bytes_per_block
        self._kept: list[Advance] = []
        """In the order of the steps."""
        self._tokens = 0
        """Of all that is kept."""
        self._most = 0
        """Tokens that may be kept; 0 until it is known how large their states are."""
        self._table: SlotTable

    def begin(self, slots: Slots) -> None:
        self._keep([])
        self._table = slots.table
        self.drafter.begin(slots)

    def end(self) -> None:
        self._keep([])
        self.drafter.end()

    def assign(self, slot: int) -> None:
        self.drafter.assign(slot)

    def propose(self, advance: Advance, k: int) -> I32:
        tokens = len(advance.states[0])
        if k == 0 and self._has_room(tokens, advance.states):
            self._kept.append(advance)
            self._tokens += tokens
            return np.empty((np.count_nonzero(advance.samples), 0), np.int32)
        if self._kept:
            advance = self._joined([*self._kept, advance], advance.slots, advance.samples)
            self._keep([])
        return self.drafter.propose(advance, k)

    def _has_room(self, tokens: int, states: States) -> bool:
        """What nobody needs any more goes first, as long as that is at least half."""
        if not self._most:
            self._most = min(MOST_TOKENS, MOST_BYTES // sum(each[:1].nbytes for each in states))
        if self._tokens + tokens <= self._most:
            return True
        if self._kept:
            self._keep([self._joined(self._kept)])
        return self._tokens + tokens <= self._most // 2

    def _keep(self, kept: list[Advance]) -> None:
        self._kept, self._tokens = kept, sum(len(advance.states[0]) for advance in kept)

    def _joined(self, advances: list[Advance], last: I32 = NOBODY, samples: Mask = NONE) -> Advance:
        """One row for each request that is still there, from its first position on: the blocks of others may be
        somebody else's by now. Slots `last` come first, in their order and with their bool[rows] `samples`."""
        slots, generations, starts, counts = map(
            np.concatenate, zip(*(each[:4] for each in advances), strict=True)
        )
        generation = self._table.generation
        stays = generations == generation[slots]
        order = np.concatenate((last, np.setdiff1d(slots[stays], last)))
        place = np.empty(len(generation), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        places = np.where(stays, place[slots], len(order))  # those who left come last, and are cut off
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
            advances[-1].least_chance,
        )
