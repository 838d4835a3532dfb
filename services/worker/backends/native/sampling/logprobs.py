"""Log-probabilities of the model's own logits: of sampled tokens, and of prompts."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from services.worker.backends.native.kernels.interface.sampling import SamplingKernels
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import NONE, Rows, SlotTable

I32 = NDArray[np.int32]
SLICE = 1 << 22
"""Logits of prompt positions that are in memory at once."""


def score(
    kernels: SamplingKernels,
    logits: torch.Tensor,
    rows: I32,
    slots: I32,
    positions: I32,
    tokens: I32,
    tops: I32,
) -> LogprobRows:
    """Log-probabilities of at least one row, in arrays that later steps do not change.

    Args:
        logits: float32[any, vocab]
        rows: int32[rows], the rows of `logits` to score
        slots, positions: int32[rows], slot and position of each token
        tokens: int32[rows], the tokens
        tops: int32[rows], number of the most likely tokens to return
    """
    tops = np.minimum(tops, logits.shape[1]).astype(np.int32)
    scored = kernels.logprobs(logits, rows, tokens, tops)
    return LogprobRows(slots, positions, scored.counts, scored.token_ranks, scored.ids, scored.values)


class PromptScores:
    """The prompt tokens whose predecessor a step computes, where their log-probabilities are wanted.

    Every rank of the last stage makes the same from the plan alone: the ranks of its tensor-parallel group gather the
    logits slice by slice, and the first of them takes those.
    """

    def __init__(self, rows: Rows, table: SlotTable, kernels: SamplingKernels, history: TokenHistory) -> None:
        self._kernels, self._history = kernels, history
        ends = np.minimum(rows.ends, table.num_prompt[rows.slots] - 1)
        wanted = np.where(table.prompt_logprobs[rows.slots] != NONE, ends - rows.starts, 0).clip(min=0)
        first = np.cumsum(rows.counts) - rows.counts
        offset = np.arange(wanted.sum()) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        self._tokens = torch.from_numpy((np.repeat(first, wanted) + offset).astype(np.int64))
        self._slots = np.repeat(rows.slots, wanted)
        self._positions = (np.repeat(rows.starts, wanted) + offset + 1).astype(np.int32)
        self._taken = 0
        self._parts: list[LogprobRows] = []
        self._tops = table.prompt_logprobs[self._slots]

    @classmethod
    def from_rows(
        cls, rows: Rows, table: SlotTable, kernels: SamplingKernels, history: TokenHistory
    ) -> "PromptScores | None":
        """None when the step has no such token."""
        slots = rows.slots
        has = (table.prompt_logprobs[slots] != NONE) & (rows.starts < table.num_prompt[slots] - 1)
        return cls(rows, table, kernels, history) if has.any() else None

    def slices(self, vocab_size: int) -> Iterator[torch.Tensor]:
        """Yield indices of the step's tokens, int64[some]. `take` their logits before the next ones are computed."""
        yield from self._tokens.split(max(1, SLICE // vocab_size))

    def take(self, logits: torch.Tensor) -> None:
        """Score the tokens of the last slice; `logits`: float32[some, vocab]."""
        part = slice(self._taken, self._taken + len(logits))
        slots, positions = self._slots[part], self._positions[part]
        tokens = self._history.gather(slots, positions)
        every = np.arange(len(logits), dtype=np.int32)
        self._parts.append(score(self._kernels, logits, every, slots, positions, tokens, self._tops[part]))
        self._taken = part.stop

    @property
    def logprobs(self) -> LogprobRows:
        """Log-probabilities of all slices; complete when every slice was taken."""
        return LogprobRows.concatenate(self._parts)
