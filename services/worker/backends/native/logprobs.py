"""Log-probabilities of the model's own logits: of sampled tokens, and of prompts."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from services.worker.backends.native.kernels.logprobs import logprobs_kernel
from services.worker.backends.native.state import TokenHistory
from services.worker.batch.slots import NONE, Rows, SlotTable

I32 = NDArray[np.int32]
SLICE = 1 << 22
"""Logits of prompt positions that are in memory at once."""


class Scorer:
    """For one calling thread."""

    def __init__(self) -> None:
        self._kernel = logprobs_kernel()

    def score(
        self,
        rows: NDArray[np.int64],
        vocab_size: int,
        slots: I32,
        positions: I32,
        tokens: I32,
        tops: I32,
    ) -> LogprobRows:
        """Of at least one row, in memory of its own.

        Args:
            rows: address of each row's float32[vocab_size] logits
            slots, positions: whose token and where it stands
            tokens: the token itself
            tops: how many of the most likely ones are wanted
        """
        tops = np.minimum(tops, vocab_size).astype(np.int32)
        counts = tops + np.int32(1)
        firsts = np.cumsum(counts, dtype=np.int32) - counts
        entries = int(counts.sum())
        ids, values = np.empty(entries, np.int32), np.empty(entries, np.float32)
        ranks = np.empty(len(rows), np.int32)
        columns = tokens, tops, firsts, ids, values, ranks
        addresses = [column.ctypes.data for column in columns]
        self._kernel.run(len(rows), (rows.ctypes.data, vocab_size, *addresses, entries))
        return LogprobRows(slots, positions, counts, ranks, ids, values)


class PromptScores:
    """The prompt tokens whose predecessor a step computes, where their log-probabilities are wanted.

    Every rank of the last stage makes the same from the plan alone: the ranks of its team gather the logits slice by
    slice, and the first of them takes those.
    """

    def __init__(self, rows: Rows, table: SlotTable, scorer: Scorer, history: TokenHistory) -> None:
        self._scorer, self._history = scorer, history
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
    def of(cls, rows: Rows, table: SlotTable, scorer: Scorer, history: TokenHistory) -> "PromptScores | None":
        """None when the step has no such token."""
        asks = (table.prompt_logprobs[rows.slots] != NONE) & (rows.starts < table.num_prompt[rows.slots] - 1)
        return cls(rows, table, scorer, history) if asks.any() else None

    def slices(self, vocab_size: int) -> Iterator[torch.Tensor]:
        """int64[some]: which of the step's tokens; `take` their logits before the next ones are made."""
        yield from self._tokens.split(max(1, SLICE // vocab_size))

    def take(self, logits: torch.Tensor) -> None:
        """float32[some, vocab] after the tokens of the last slice."""
        part = slice(self._taken, self._taken + len(logits))
        slots, positions = self._slots[part], self._positions[part]
        tokens = self._history.gather(torch.from_numpy(slots), torch.from_numpy(positions)).numpy()
        rows = addresses(logits)
        vocab_size = logits.shape[1]
        self._parts.append(
            self._scorer.score(rows, vocab_size, slots, positions, tokens.astype(np.int32), self._tops[part])
        )
        self._taken = part.stop

    @property
    def logprobs(self) -> LogprobRows:
        """Of all slices, once they were taken."""
        return LogprobRows.concatenate(self._parts)


def addresses(logits: torch.Tensor) -> NDArray[np.int64]:
    """int64[rows] of contiguous float32[rows, vocab]."""
    return logits.data_ptr() + np.arange(len(logits), dtype=np.int64) * (logits.shape[1] * 4)
