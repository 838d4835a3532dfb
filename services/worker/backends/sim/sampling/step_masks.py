"""Grammar bitmasks of one step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from protocol.columns import has_all
from protocol.rows import GrammarRows
from protocol.steps import GrammarOutput
from services.worker.batch.slots import I32

NO_ROWS = np.empty(0, np.int32)


class StepMasks(NamedTuple):
    """Masks of a step's constrained rows. A row's masks are for consecutive positions from its first sampled one, and
    follow one another."""

    rows: I32 = NO_ROWS
    """int32[rows], indices among the sampled rows."""
    counts: I32 = NO_ROWS
    """int32[rows]: number of masks of each."""
    masks: I32 = NO_ROWS.reshape(0, 0)
    """int32[sum(counts), words]"""
    left_out: I32 = NO_ROWS
    """int32[rows], indices among the sampled rows: constrained ones without masks (left-out row)."""

    @classmethod
    def from_messages(
        cls, parts: Sequence[GrammarOutput], slots: I32, vocab_size: int, left_out: frozenset[int] = frozenset()
    ) -> "StepMasks":
        """Read the masks of the step whose sampled rows have `slots`.

        Args:
            left_out: slots of the rows that are left out.
        """
        if not parts and not left_out:
            return cls()
        row_of = {slot: row for row, slot in enumerate(slots.tolist())}
        without = sorted(row for slot in left_out if (row := row_of.pop(slot, None)) is not None)
        if not parts:
            return cls(left_out=np.array(without, np.int32))
        columns = zip(*(GrammarRows.from_message(part, vocab_size) for part in parts), strict=True)
        constrained, counts, masks = map(np.concatenate, columns)
        rows = np.array([row_of.get(slot, -1) for slot in constrained.tolist()], np.int32)
        if not has_all(sampled := rows >= 0):
            rows, counts, masks = rows[sampled], counts[sampled], masks[np.repeat(sampled, counts)]
        return cls(rows, counts, masks, np.array(without, np.int32))

    @property
    def firsts(self) -> I32:
        """int32[rows], index of each row's first mask."""
        return np.cumsum(self.counts, dtype=np.int32) - self.counts

    def acceptable(self, drafts: I32) -> I32:
        """Return the drafts of each sampled row that may be accepted: one less than its masks (acceptable drafts)."""
        acceptable = drafts.copy()
        acceptable[self.rows] = np.minimum(drafts[self.rows], self.counts - 1)
        return acceptable
