"""Log-probabilities of the model's own logits: of sampled tokens, and of prompts."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from protocol.columns import has_any
from protocol.rows import LogprobRows
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import I32, NONE, BatchColumns, Rows, spread
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.interface.sampling import SamplingKernels, ScoredTokens

SLICE = 1 << 22
"""Logits of prompt positions that are in memory at once."""


class ScoredRows(NamedTuple):
    """Log-probabilities of at least one row, in memory that later steps do not change."""

    slots: I32
    positions: I32
    """Position of each row's token."""
    tokens: ScoredTokens


def score(
    kernels: SamplingKernels,
    logits: torch.Tensor,
    rows: I32,
    slots: I32,
    positions: I32,
    tokens: torch.Tensor,
    tops: I32,
) -> ScoredRows:
    """Score at least one row.

    Args:
        logits: float32[any, vocab]
        rows: int32[rows], the rows of `logits` to score
        slots, positions: int32[rows], slot and position of each token
        tokens: int32[rows], the tokens
        tops: int32[rows], number of the most likely tokens to return
    """
    tops = np.minimum(tops, logits.shape[1]).astype(np.int32)
    return ScoredRows(slots, positions, kernels.logprobs(logits, rows, tokens, tops))


def download_scores(scored: Sequence[ScoredRows], device: ComputeDevice) -> Callable[[], LogprobRows | None]:
    """Copy log-probabilities of a step to the host. Return a function that waits for them; None: there are none."""
    copies = [device.download(x.tokens.token_ranks, x.tokens.ids, x.tokens.values) for x in scored]

    def arrived() -> LogprobRows | None:
        waiting = zip(scored, copies, strict=True)
        rows = [LogprobRows(x.slots, x.positions, x.tokens.counts, *copy()) for x, copy in waiting]
        return LogprobRows.concatenate(rows) if rows else None

    return arrived


class PromptScores:
    """The prompt tokens whose predecessor a step computes, where their log-probabilities are wanted.

    Every rank of the last stage makes the same from the plan alone: the ranks of its tensor-parallel group gather the
    logits slice by slice, and the first of them takes those.
    """

    def __init__(self, rows: Rows, table: BatchColumns, kernels: SamplingKernels, history: TokenHistory) -> None:
        self._kernels, self._history = kernels, history
        ends = np.minimum(rows.ends, table.num_prompt[rows.slots] - 1)
        wanted = np.where(table.prompt_logprobs[rows.slots] != NONE, ends - rows.starts, 0).clip(min=0)
        owners, offsets = spread(wanted)
        self._tokens = (np.cumsum(rows.counts, dtype=np.int32) - rows.counts)[owners] + offsets
        self._slots, self._positions = rows.slots[owners], rows.starts[owners] + offsets + np.int32(1)
        self._taken = 0
        self.parts: list[ScoredRows] = []
        """Scores of the slices so far; complete when every slice was taken."""
        self._tops = table.prompt_logprobs[self._slots]

    @classmethod
    def from_rows(
        cls, rows: Rows, table: BatchColumns, kernels: SamplingKernels, history: TokenHistory
    ) -> "PromptScores | None":
        """None when the step has no such token."""
        slots = rows.slots
        wanted = table.prompt_logprobs[slots] != NONE
        if not has_any(wanted):  # every step pays for this
            return None
        has = wanted & (rows.starts < table.num_prompt[slots] - 1)
        return cls(rows, table, kernels, history) if has.any() else None

    def slices(self, vocab_size: int) -> Iterator[I32]:
        """Yield indices of the step's tokens, int32[some]. `take` their logits before the next ones are computed."""
        most = max(1, SLICE // vocab_size)
        for first in range(0, len(self._tokens), most):
            yield self._tokens[first : first + most]

    def take(self, logits: torch.Tensor) -> None:
        """Score the tokens of the last slice; `logits`: float32[some, vocab]."""
        part = slice(self._taken, self._taken + len(logits))
        slots, positions = self._slots[part], self._positions[part]
        tokens = self._history.gather(slots, positions)
        every = np.arange(len(logits), dtype=np.int32)
        self.parts.append(score(self._kernels, logits, every, slots, positions, tokens, self._tops[part]))
        self._taken = part.stop
