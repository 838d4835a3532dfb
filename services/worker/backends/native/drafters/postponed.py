"""While nobody wants drafts, a drafter need not follow every step: what it has to read is kept and read in bulk.

Hidden states are there only in the step that computes them. One token at a time they cost a drafter as much as a draft;
many at once cost little more than one. So as long as few or none of the drafts would be accepted, speculation that is
switched down to nothing costs next to nothing.
"""

import numpy as np
import torch

from services.worker.backends.native.drafters.base import I32, Advance, Drafter, Slots
from services.worker.batch import SlotTable

MOST_TOKENS = 1024
"""That are kept: the step that reads them at last must not be much longer than one with a chunk of a prompt."""
MOST_BYTES = 8 << 20
"""Of their hidden states, which lie beside the cache: enough of a large model's to be read in bulk."""


class Postponed(Drafter):
    """`drafter`, which hears of steps without drafts when it is asked for some, or when they have become many."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.reads, self.bytes_per_block = drafter.reads, drafter.bytes_per_block
        self._kept: _Kept | None = None
        self._table: SlotTable

    def begin(self, slots: Slots) -> None:
        self._kept, self._table = None, slots.table
        self.drafter.begin(slots)

    def end(self) -> None:
        self._kept = None
        self.drafter.end()

    def assign(self, slot: int) -> None:
        self.drafter.assign(slot)

    def propose(self, advance: Advance, k: int) -> I32:
        if self._kept is None:
            self._kept = _Kept(advance)
        kept = self._kept
        if k == 0 and self._has_room(kept, len(advance.states[0])):
            kept.add(advance)
            return np.empty((np.count_nonzero(advance.samples), 0), np.int32)
        if kept.num_rows:
            kept.drop_gone(self._table.generation)
            advance = kept.joined(advance)
            kept.clear()
        return self.drafter.propose(advance, k)

    def _has_room(self, kept: "_Kept", tokens: int) -> bool:
        """What nobody needs any more goes first, as long as that is at least half."""
        if kept.num_tokens + tokens <= kept.most:
            return True
        kept.drop_gone(self._table.generation)
        return kept.num_tokens + tokens <= kept.most // 2


class _Kept:
    """Rows of steps like `first`, in the order of the steps."""

    def __init__(self, first: Advance) -> None:
        bytes_per_token = sum(states[:1].nbytes for states in first.states)
        self.most = min(MOST_TOKENS, MOST_BYTES // bytes_per_token)
        self._rows = np.empty((4, self.most), np.int32)
        """Slots, generations, starts and counts of an `Advance`."""
        self._states = [states.new_empty((self.most, states.shape[1])) for states in first.states]
        self.num_rows = self.num_tokens = 0

    def clear(self) -> None:
        self.num_rows = self.num_tokens = 0

    def add(self, advance: Advance) -> None:
        rows, tokens = self.num_rows + len(advance.slots), self.num_tokens + len(advance.states[0])
        for column, its in zip(self._rows, _columns(advance), strict=True):
            column[self.num_rows : rows] = its
        for kept, states in zip(self._states, advance.states, strict=True):
            kept[self.num_tokens : tokens] = states
        self.num_rows, self.num_tokens = rows, tokens

    def drop_gone(self, generation: I32) -> None:
        """Leaves the rows of requests that are still there, `generation` being that of each slot: the blocks of others
        may be somebody else's by now."""
        slots, generations, _, counts = rows = self._rows[:, : self.num_rows]
        stays = generations == generation[slots]
        if stays.all():
            return
        tokens = torch.from_numpy(np.flatnonzero(np.repeat(stays, counts)))
        for kept in self._states:
            kept[: len(tokens)] = kept[tokens]
        rows = rows[:, stays]
        self.num_rows, self.num_tokens = rows.shape[1], len(tokens)
        self._rows[:, : self.num_rows] = rows

    def joined(self, last: Advance) -> Advance:
        """One row for each slot, from its first position on: those of `last` as they are there, then the others."""
        rows = np.concatenate((self._rows[:, : self.num_rows], _columns(last)), axis=1)
        others = np.setdiff1d(self._rows[0, : self.num_rows], last.slots)
        slots = np.concatenate((last.slots, others))
        place = np.empty(int(slots.max()) + 1, np.int32)
        place[slots] = np.arange(len(slots), dtype=np.int32)
        places = place[rows[0]]
        first = np.unique(places, return_index=True)[1]
        by_token = np.repeat(places, rows[3])
        order = torch.from_numpy(np.argsort(by_token, kind="stable"))
        states = zip(self._states, last.states, strict=True)
        return Advance(
            slots,
            rows[1, first],
            rows[2, first],
            np.bincount(by_token).astype(np.int32),
            np.concatenate((last.samples, np.zeros(len(others), np.bool_))),
            [torch.cat((kept[: self.num_tokens], its))[order] for kept, its in states],
            last.least_chance,
        )


def _columns(advance: Advance) -> tuple[I32, I32, I32, I32]:
    return advance.slots, advance.generations, advance.starts, advance.counts
