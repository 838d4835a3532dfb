"""Grammar bitmasks of one step."""

from typing import NamedTuple

import numpy as np

from protocol.rows import GrammarRows
from protocol.steps import GrammarOutput
from services.worker.batch.slots import I32

NO_ROWS = np.empty(0, np.int32)


class StepMasks(NamedTuple):
    """Masks of a step's constrained rows. A row's masks are for consecutive positions from its first sampled one."""

    by_row: dict[int, I32]
    """Index among the sampled rows -> int32[masks, words]."""
    left_out: I32 = NO_ROWS
    """int32[rows], indices among the sampled rows: constrained ones without masks (left-out row)."""

    @classmethod
    def from_message(
        cls, grammar: GrammarOutput | None, slots: I32, vocab_size: int, left_out: I32 = NO_ROWS
    ) -> "StepMasks":
        """Read the masks of the step whose sampled rows have `slots`; None: there are none.

        Args:
            left_out: slots of the rows that are left out.
        """
        if grammar is None and not len(left_out):
            return cls({})
        is_out = np.isin(slots, left_out)
        without = np.flatnonzero(is_out).astype(np.int32)
        if grammar is None:
            return cls({}, without)
        constrained, counts, masks = GrammarRows.from_message(grammar, vocab_size)
        row_of = {slot: row for row, slot in enumerate(slots.tolist()) if not is_out[row]}
        rows = zip(constrained.tolist(), counts.tolist(), np.cumsum(counts).tolist(), strict=True)
        return cls({row_of[s]: masks[end - count : end] for s, count, end in rows if s in row_of}, without)

    def acceptable(self, drafts: I32) -> I32:
        """Return the drafts of each sampled row that may be accepted: one less than its masks (acceptable drafts)."""
        acceptable = drafts.copy()
        for row, masks in self.by_row.items():
            acceptable[row] = min(acceptable[row], len(masks) - 1)
        return acceptable
