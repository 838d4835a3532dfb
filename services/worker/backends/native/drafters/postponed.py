"""While nobody wants drafts, a drafter need not follow every step: what it has to read is kept and read in bulk.

Hidden states are there only in the step that computes them. One token at a time they cost a drafter as much as a draft;
many at once cost little more than one. So as long as few or none of the drafts would be accepted, speculation that is
switched down to nothing costs next to nothing.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.drafters.base import I32, Advance, Drafter, Slots
from services.worker.batch import SlotTable

MOST = 4096
"""Tokens whose hidden states are kept."""


class Postponed(Drafter):
    """`drafter`, which hears of steps without drafts when it is asked for some, or when they have become many."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.reads, self.bytes_per_block = drafter.reads, drafter.bytes_per_block
        self._kept: list[Advance] = []
        self._tokens = 0
        """Of all that is kept."""
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
        if k == 0 and self._has_room(tokens := int(advance.counts.sum())):
            self._kept.append(advance)
            self._tokens += tokens
            return np.empty((np.count_nonzero(advance.samples), 0), np.int32)
        kept = self._needed()
        self._keep([])
        return self.drafter.propose(_joined(kept, advance) if kept else advance, k)

    def _has_room(self, tokens: int) -> bool:
        """What nobody needs any more goes first, as long as that is at least half."""
        if self._tokens + tokens <= MOST:
            return True
        self._keep(self._needed())
        return self._tokens + tokens <= MOST // 2

    def _keep(self, kept: list[Advance]) -> None:
        self._kept, self._tokens = kept, sum(int(advance.counts.sum()) for advance in kept)

    def _needed(self) -> list[Advance]:
        """Rows of requests that are still there: the blocks of others may be somebody else's by now."""
        generation = self._table.generation
        present = [_where(each, each.generations == generation[each.slots]) for each in self._kept]
        return [each for each in present if len(each.slots)]


def _where(advance: Advance, stays: NDArray[np.bool_]) -> Advance:
    """The rows of bool[rows] `stays`."""
    if stays.all():
        return advance
    tokens = torch.from_numpy(np.flatnonzero(np.repeat(stays, advance.counts)))
    states = [each[tokens] for each in advance.states]
    return Advance(
        advance.slots[stays],
        advance.generations[stays],
        advance.starts[stays],
        advance.counts[stays],
        advance.samples[stays],
        states,
        advance.least_chance,
    )


def _joined(kept: list[Advance], last: Advance) -> Advance:
    """One row for each slot: those of `last` as they are there, then those that it skips."""
    advances = [*kept, last]
    skipped = np.setdiff1d(np.concatenate([advance.slots for advance in kept]), last.slots)
    slots = np.concatenate((last.slots, skipped)).astype(np.int32)
    place = np.zeros(int(slots.max()) + 1, np.int64)
    place[slots] = np.arange(len(slots))
    rows = np.concatenate([np.repeat(place[advance.slots], advance.counts) for advance in advances])
    order = np.argsort(rows, kind="stable")
    counts = np.bincount(rows, minlength=len(slots)).astype(np.int32)
    generations, starts = np.zeros((2, len(slots)), np.int32)
    for advance in reversed(advances):
        at = place[advance.slots]
        generations[at], starts[at] = advance.generations, advance.starts
    by_read = zip(*(advance.states for advance in advances), strict=True)
    states = [torch.cat(each)[torch.from_numpy(order)] for each in by_read]
    samples = np.concatenate((last.samples, np.zeros(len(skipped), np.bool_)))
    return Advance(slots, generations, starts, counts, samples, states, last.least_chance)
