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
from services.worker.backends.native.kernels.sampling import sampling_kernel
from services.worker.backends.native.logprobs import Scorer, addresses
from services.worker.backends.native.mask import Mask, Masker
from services.worker.backends.native.rules import Rules
from services.worker.backends.native.state import TokenHistory
from services.worker.batch import NONE, SlotTable
from services.worker.noise import Purpose, keys

I32 = NDArray[np.int32]
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


class Sampled(NamedTuple):
    ids: torch.Tensor
    """int64[rows]"""
    logprobs: LogprobRows | None
    """Of the rows that ask for them; owners are slots."""


class Sampler:
    """For one calling thread, on the rank that samples."""

    def __init__(self, table: SlotTable, history: TokenHistory, vocab_size: int) -> None:
        self._table = table
        self._kernel = sampling_kernel()
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
        ids = logits.argmax(-1)
        rows = np.flatnonzero(self._table.temperature[slots] >= GREEDY_BELOW).astype(np.int32)
        if len(rows):
            ids[torch.from_numpy(rows.astype(np.int64))] = self._draw(logits, slots, positions, rows)
        if raw is None:
            return Sampled(ids, None)
        tokens = ids.numpy()[scored].astype(np.int32)
        tops = self._table.logprobs[slots[scored]]
        owners, where = slots[scored], positions[scored]
        return Sampled(ids, self.scorer.score(raw.addresses, logits.shape[1], owners, where, tokens, tops))

    def _raw(self, logits: torch.Tensor, slots: I32, scored: NDArray[np.int64], mask: Mask | None) -> "_Raw":
        """The logits of `scored` rows as they will still be after sampling: a copy of what that changes."""
        changes = self._rules.changes(slots)
        if mask is not None:
            changes[mask.rows] = True
        copied = np.flatnonzero(changes[scored])
        copy = logits[torch.from_numpy(scored[copied])]
        at = addresses(logits)[scored]
        at[copied] = addresses(copy)
        return _Raw(at, copy)

    def _draw(self, logits: torch.Tensor, slots: I32, positions: I32, rows: I32) -> torch.Tensor:
        table, chosen = self._table, slots[rows]
        ids = np.empty(len(rows), np.int32)
        columns: list[NDArray[Any]] = [
            column[chosen] for column in (table.temperature, table.min_p, table.top_k, table.top_p)
        ]
        columns += [*keys(table.seed[chosen], positions[rows], Purpose.SAMPLE), ids]
        places = [column.ctypes.data for column in columns]
        self._kernel.run(len(rows), (logits.data_ptr(), rows.ctypes.data, logits.shape[1], *places))
        return torch.from_numpy(ids).long()


class _Raw(NamedTuple):
    addresses: NDArray[np.int64]
    """int64[rows]"""
    copy: torch.Tensor
    """What some of them are addresses in."""
