"""From logits to token ids, all rows at once; a row's result depends on its own logits and parameters only.

The order is vLLM's: allowed ids, bad words, what may not be sampled yet, biases, penalties (rules.py), the grammar's
mask, then temperature, min-p, top-k, top-p and the noise of `services.worker.noise`. Tokens that tie with the last one
kept are kept too. Of equal maxima the lowest id wins, also where nothing is left. Log-probabilities are of the logits
before all this.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from protocol.steps import GrammarOutput
from services.worker.backends.native.kernels.sampling import greedy_kernel, sampling_kernel
from services.worker.backends.native.logprobs import Scorer, addresses
from services.worker.backends.native.mask import Mask, Masker
from services.worker.backends.native.rules import Rules
from services.worker.backends.native.state import TokenHistory
from services.worker.batch import NONE, SlotTable
from services.worker.noise import Purpose, keys
from services.worker.sampling import GREEDY_BELOW

I32 = NDArray[np.int32]


class Sampled(NamedTuple):
    ids: torch.Tensor
    """int64[rows]"""
    logprobs: LogprobRows | None
    """Of the rows that ask for them; owners are slots."""


class Sampler:
    """For one calling thread, on the rank that samples."""

    def __init__(self, table: SlotTable, history: TokenHistory, vocab_size: int) -> None:
        self._table = table
        self._greedy, self._draw = greedy_kernel(), sampling_kernel()
        self._copy = torch.empty(0, vocab_size)
        """Raw logits of one step; kept, as fresh memory costs more than the copy."""
        self._rules, self._masker, self.scorer = Rules(table, history, vocab_size), Masker(), Scorer()

    def assign(self, slot: int) -> None:
        """The slot has another request; the table has its parameters, the history its tokens."""
        self._rules.assign(slot)

    def sample(
        self, logits: torch.Tensor, slots: I32, positions: I32, grammar: GrammarOutput | None = None
    ) -> Sampled:
        """Samples one token per row.

        Args:
            logits: float32[rows, vocab], changed in place
            slots: the slot of each row, where its parameters are
            positions: the absolute position that each sampled token will have
        """
        if not len(slots):
            return Sampled(torch.empty(0, dtype=torch.int64), None)
        mask = Mask.of(grammar, slots, logits.shape[1]) if grammar is not None else None
        scored = np.flatnonzero(self._table.logprobs[slots] != NONE)
        raw = self._raw(logits, slots, scored, mask) if len(scored) else None
        self._rules.apply(logits, slots, positions)
        if mask is not None:
            self._masker.apply(logits, mask)
        ids = self._chosen(logits, slots, positions)
        result = torch.from_numpy(ids).long()
        if raw is None:
            return Sampled(result, None)
        tops = self._table.logprobs[slots[scored]]
        columns = slots[scored], positions[scored], ids[scored], tops
        return Sampled(result, self.scorer.score(raw, logits.shape[1], *columns))

    def _raw(
        self, logits: torch.Tensor, slots: I32, scored: NDArray[np.int64], mask: Mask | None
    ) -> NDArray[np.int64]:
        """Where the logits of `scored` rows will still be after sampling; what that changes is copied."""
        changes = self._rules.changes(slots)
        if mask is not None:
            changes[mask.rows] = True
        copied = np.flatnonzero(changes[scored])
        if len(copied) > len(self._copy):
            self._copy = torch.empty(len(copied), logits.shape[1])
        copy = self._copy[: len(copied)]
        torch.index_select(logits, 0, torch.from_numpy(scored[copied]), out=copy)
        at = addresses(logits)[scored]
        at[copied] = addresses(copy)
        return at

    def _chosen(self, logits: torch.Tensor, slots: I32, positions: I32) -> I32:
        table, ids = self._table, np.empty(len(slots), np.int32)
        draws = table.temperature[slots] >= GREEDY_BELOW
        rows, chosen = _rows(~draws)
        if len(rows):
            where = logits.data_ptr(), rows.ctypes.data, logits.shape[1]
            self._greedy.run(len(rows), (*where, chosen.ctypes.data))
            ids[rows] = chosen
        rows, chosen = _rows(draws)
        if len(rows):
            slots, positions = slots[rows], positions[rows]
            columns: list[NDArray[Any]] = [
                column[slots] for column in (table.temperature, table.min_p, table.top_k, table.top_p)
            ]
            columns += [*keys(table.seed[slots], positions, Purpose.SAMPLE), chosen]
            where = logits.data_ptr(), rows.ctypes.data, logits.shape[1]
            self._draw.run(len(rows), (*where, *(column.ctypes.data for column in columns)))
            ids[rows] = chosen
        return ids


def _rows(mask: NDArray[np.bool_]) -> tuple[I32, I32]:
    """The rows of the mask, and room for their ids."""
    rows = np.flatnonzero(mask).astype(np.int32)
    return rows, np.empty(len(rows), np.int32)
