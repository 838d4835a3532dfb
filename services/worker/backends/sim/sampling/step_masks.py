"""Grammar bitmasks of one step."""

from typing import NamedTuple

import numpy as np

from protocol.rows import GrammarRows
from protocol.steps import GrammarOutput
from services.worker.batch.slots import I32


class StepMasks(NamedTuple):
    """Masks of a step's constrained rows. A row's masks are for consecutive positions from its first sampled one."""

    by_row: dict[int, I32]
    """Index among the sampled rows -> int32[masks, words]."""

    @classmethod
    def from_message(cls, grammar: GrammarOutput | None, slots: I32, vocab_size: int) -> "StepMasks":
        """Read the masks of the step whose sampled rows have `slots`; None: no row is constrained."""
        if grammar is None:
            return cls({})
        constrained, counts, masks = GrammarRows.from_message(grammar, vocab_size)
        row_of = {slot: row for row, slot in enumerate(slots.tolist())}
        rows = zip(constrained.tolist(), counts.tolist(), np.cumsum(counts).tolist(), strict=True)
        return cls({row_of[s]: masks[end - count : end] for s, count, end in rows if s in row_of})

    def acceptable(self, drafts: I32) -> I32:
        """Return the drafts of each sampled row that may be accepted: one less than its masks (acceptable drafts)."""
        acceptable = drafts.copy()
        for row, masks in self.by_row.items():
            acceptable[row] = min(acceptable[row], len(masks) - 1)
        return acceptable
