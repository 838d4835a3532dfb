"""From logits to token ids, all rows at once; a row's result depends on its own logits and parameters only.

The order is vLLM's: allowed ids, bad words, what may not be sampled yet, biases, penalties (rules.py), the grammar's
mask, then temperature, min-p, top-k, top-p and the noise of `services.worker.sampling.noise`. Tokens that tie with
the last one kept are kept too. Of equal maxima the lowest id wins, also where nothing is left. Log-probabilities are
of the logits before all this.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from protocol.steps import GrammarOutput
from services.worker.backends.native.acceptance import Places, accept
from services.worker.backends.native.kernels.sampling import greedy_kernel, sampling_kernel
from services.worker.backends.native.logprobs import Scorer, addresses
from services.worker.backends.native.mask import Mask, Masker
from services.worker.backends.native.rules import Rules
from services.worker.backends.native.state import TokenHistory
from services.worker.batch.slots import NONE, SlotTable
from services.worker.sampling.noise import Purpose, keys
from services.worker.sampling.reference import GREEDY_BELOW

I32 = NDArray[np.int32]


class Sampled(NamedTuple):
    """Of each row the drafts that were accepted and one token more."""

    ids: torch.Tensor
    """int64[sum(counts)], rows back to back"""
    counts: I32
    """int32[rows]"""
    drafted: I32
    """int32[rows]: drafts that were verified"""
    logprobs: LogprobRows | None
    """Of the rows that ask for them; owners are slots."""


class Sampler:
    """For one calling thread, on the rank that samples."""

    def __init__(self, table: SlotTable, history: TokenHistory, vocab_size: int) -> None:
        self._table, self._history = table, history
        self._greedy, self._draw = greedy_kernel(), sampling_kernel()
        self._copy = torch.empty(0, vocab_size)
        """Raw logits of one step; kept, as fresh memory costs more than the copy."""
        self._rules, self._masker, self.scorer = Rules(table, history, vocab_size), Masker(), Scorer()

    def assign(self, slot: int) -> None:
        """The slot has another request; the table has its parameters, the history its tokens."""
        self._rules.assign(slot)

    def sample(
        self,
        logits: torch.Tensor,
        slots: I32,
        positions: I32,
        grammar: GrammarOutput | None = None,
        drafts: I32 | None = None,
    ) -> Sampled:
        """Samples a token after each row, and one after each of its drafts as long as they are accepted.

        Args:
            logits: float32[rows + drafts, vocab], changed in place
            slots: int32[rows], where each row's parameters are
            positions: int32[rows], the absolute position of each row's first sampled token; its drafts stand in the
                history from there on
            drafts: int32[rows], how many there are; None: none
        """
        none = np.zeros(len(slots), np.int32)
        drafts = none if drafts is None else drafts
        if not len(slots):
            return Sampled(torch.empty(0, dtype=torch.int64), none, none, None)
        places = Places.of(slots, positions, drafts)
        slots, positions = places.slots, places.positions
        mask = Mask.of(grammar, slots[places.offsets == 0], drafts, logits.shape[1]) if grammar else None
        scored = np.flatnonzero(self._table.logprobs[slots] != NONE)
        raw = self._raw(logits, slots, scored, mask) if len(scored) else None
        self._rules.apply(logits, slots, positions)
        if mask is not None:
            self._masker.apply(logits, mask)
        ids = self._chosen(logits, slots, positions)
        accepted = accept(places, ids, self._history, drafts if mask is None else mask.acceptable)
        result = Sampled(
            torch.from_numpy(ids[accepted.tokens]).long(), accepted.counts, accepted.drafted, None
        )
        if raw is None:
            return result
        emitted = accepted.tokens[scored]
        scored, raw = scored[emitted], raw[emitted]
        tops = self._table.logprobs[slots[scored]]
        columns = slots[scored], positions[scored], ids[scored], tops
        return result._replace(logprobs=self.scorer.score(raw, logits.shape[1], *columns))

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
