"""Sampling parameters of a step's rows, copied at launch: a slot may have another owner when the device samples."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.columns import F32, indices
from protocol.sampling import SamplingParams
from services.worker.batch.slots import I32, Rows, SlotTable


class RowRules(NamedTuple):
    """Rules of a row that change its logits: min_tokens, penalties, bias, bad words and allowed tokens."""

    params: SamplingParams
    num_prompt: int
    reshapes: bool
    """True if more than the tokens that `min_tokens` forbids can change which token is the greatest."""

    def keep(self, top: int, position: int) -> bool:
        """Return whether a row's top token is still its greatest one, with the rules, as the token at `position`."""
        params = self.params
        is_short = position < self.num_prompt + params.min_tokens
        return not (self.reshapes or (is_short and top in params.eos_token_ids + params.stop_token_ids))


class RowParameters(NamedTuple):
    """Columns of a step's sampled rows, one entry for each."""

    temperature: F32
    min_p: F32
    top_k: I32
    top_p: F32
    seed: NDArray[np.uint64]
    num_prompt: I32
    rules: dict[int, RowRules]
    """Rules of the rows that have any, by index among the sampled rows."""

    @classmethod
    def from_rows(cls, sampled: Rows, table: SlotTable) -> Self:
        """`sampled`: rows with `samples` of the plan that was just applied."""
        slots = sampled.slots
        num_prompt, reshapes = table.num_prompt[slots], table.penalized[slots] | table.edited[slots]
        earliest = np.maximum(sampled.ends - table.unsettled[slots], num_prompt)
        rules = {
            row: RowRules(table.params[slots[row]], int(num_prompt[row]), bool(reshapes[row]))
            for row in indices(reshapes | (earliest < table.banned_until[slots])).tolist()
        }
        draws = table.temperature[slots], table.min_p[slots], table.top_k[slots], table.top_p[slots], table.seed[slots]
        return cls(*draws, num_prompt, rules)
