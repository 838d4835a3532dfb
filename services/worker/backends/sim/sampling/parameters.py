"""Sampling parameters of a step's rows, copied at launch: a slot may have another owner when the device samples."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.columns import indices
from protocol.sampling import SamplingParams
from services.worker.batch.slots import I32, Rows, SlotTable

F32 = NDArray[np.float32]


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
        slots, t = sampled.slots, table
        earliest = np.maximum(sampled.ends - t.unsettled[slots], t.num_prompt[slots])
        reshapes = t.penalized[slots] | t.edited[slots]
        rules = {
            row: RowRules(t.params[slots[row]], int(t.num_prompt[slots[row]]), bool(reshapes[row]))
            for row in indices(reshapes | (earliest < t.banned_until[slots])).tolist()
        }
        draws = t.temperature[slots], t.min_p[slots], t.top_k[slots], t.top_p[slots], t.seed[slots]
        return cls(*draws, t.num_prompt[slots], rules)
