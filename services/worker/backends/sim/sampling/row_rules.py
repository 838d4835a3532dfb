"""Rules of sampled rows that change their logits: min_tokens, penalties, bias, bad words and allowed tokens."""

from dataclasses import dataclass

import numpy as np

from protocol.sampling import SamplingParams
from services.worker.batch.slots import Rows, SlotTable


@dataclass(frozen=True)
class RowRules:
    """Rules of one sampled row, copied at launch: the slot may have another owner when the device samples."""

    params: SamplingParams
    num_prompt: int
    banned: tuple[int, ...]
    """Ids that `min_tokens` forbids ..."""
    banned_until: int
    """... at positions before this one."""
    reshapes: bool
    """True if more than `banned` can change which token is the greatest."""


RulesByRow = dict[int, RowRules]
"""Index among the sampled rows -> its rules."""


def rules_by_row(rows: Rows, table: SlotTable) -> RulesByRow:
    """Return the rules of the rows that have any. `rows` are those of the plan that was just applied."""
    slots = rows.slots[rows.samples]
    earliest = np.maximum(rows.ends[rows.samples] - table.unsettled[slots], table.num_prompt[slots])
    short = earliest < table.banned_until[slots]
    reshapes = table.penalized[slots] | table.edited[slots]
    return {
        i: RowRules(
            table.params[slots[i]],
            int(table.num_prompt[slots[i]]),
            table.banned[slots[i]],
            int(table.banned_until[slots[i]]),
            bool(reshapes[i]),
        )
        for i in np.flatnonzero(short | reshapes).tolist()
    }
