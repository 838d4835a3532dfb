"""Grammar bitmasks of one step."""

from collections.abc import Sequence
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
    def from_messages(
        cls,
        parts: Sequence[GrammarOutput],
        slots: I32,
        vocab_size: int,
        left_out: frozenset[int] = frozenset(),
    ) -> "StepMasks":
        """Read the masks of the step whose sampled rows have `slots`.

        Args:
            left_out: slots of the rows that are left out.
        """
        if not parts and not left_out:
            return cls({})
        row_of = {slot: row for row, slot in enumerate(slots.tolist())}
        without = sorted(row for slot in left_out if (row := row_of.pop(slot, None)) is not None)
        by_row = {}
        for part in parts:
            constrained, counts, masks = GrammarRows.from_message(part, vocab_size)
            for slot, count, end in zip(
                constrained.tolist(), counts.tolist(), np.cumsum(counts).tolist(), strict=True
            ):
                if slot in row_of:
                    by_row[row_of[slot]] = masks[end - count : end]
        return cls(by_row, np.array(without, np.int32))

    def acceptable(self, drafts: I32) -> I32:
        """Return the drafts of each sampled row that may be accepted: one less than its masks (acceptable drafts)."""
        acceptable = drafts.copy()
        for row, masks in self.by_row.items():
            acceptable[row] = min(acceptable[row], len(masks) - 1)
        return acceptable
