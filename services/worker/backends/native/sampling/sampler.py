"""From logits to token ids, all rows at once; a row's result depends on its own logits and parameters only.

The order is vLLM's: allowed ids, bad words, banned ids, biases, penalties (the slot's logit rule), the grammar's mask,
then temperature, min-p, top-k, top-p and the noise of `services.worker.sampling.noise`. Tokens that tie with the last
one kept are kept too. Of equal maxima the lowest id wins, also where nothing is left. Log-probabilities are those of
the logits before all this.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.columns import has_all, has_any
from protocol.steps import GrammarOutput
from services.worker.backends.native.sampling.acceptance import SamplePositions
from services.worker.backends.native.sampling.logprobs import ScoredRows, score
from services.worker.backends.native.sampling.preparation import run_every_operation
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.masks import GrammarMask
from services.worker.batch.slots import I32, NONE, BatchColumns
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.interface.logit_rules import LogitRule
from services.worker.kernels.interface.sampling import DrawColumns
from services.worker.sampling.reference import GREEDY_BELOW


def rule_of_slot(table: BatchColumns, slot: int, vocab_size: int) -> LogitRule | None:
    """Return the logit rule of a request; None where the parameters change no logits.

    Ids outside the vocabulary have no effect.
    """
    if not (table.penalized[slot] or table.edited[slot] or table.banned[slot]):
        return None
    params = table.params[slot]
    biases = [(token, bias) for token, bias in params.logit_bias if token < vocab_size]
    allowed = params.allowed_token_ids
    return LogitRule(
        num_prompt=int(table.num_prompt[slot]),
        allowed=np.unique(_inside(unpack(allowed), vocab_size)) if allowed else None,
        bad_words=tuple(np.array(word, np.int32) for word in params.bad_words if word[-1] < vocab_size),
        banned=_inside(np.array(table.banned[slot], np.int32), vocab_size) if table.banned[slot] else None,
        banned_until=int(table.banned_until[slot]),
        biased=np.array([token for token, _ in biases], np.int32) if biases else None,
        biases=np.array([bias for _, bias in biases], np.float32) if biases else None,
        penalizes=bool(table.penalized[slot]),
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
    )


def _inside(tokens: I32, vocab_size: int) -> I32:
    return tokens[(tokens >= 0) & (tokens < vocab_size)]


class SampledTokens(NamedTuple):
    """The accepted drafts of each row, and one more token."""

    ids: torch.Tensor
    """int32[sum(counts)], rows back to back"""
    counts: I32
    """int32[rows]"""
    drafted: I32
    """int32[rows]: drafts that were verified"""
    logprobs: ScoredRows | None
    """Log-probabilities of the rows that request them."""


class Sampler:
    """Sampling on the output rank. For one calling thread."""

    def __init__(self, table: BatchColumns, history: TokenHistory, vocab_size: int, kernels: Kernels) -> None:
        self._table, self._history, self._vocab_size, self._kernels = table, history, vocab_size, kernels
        self.rules = kernels.sampling.logit_rules(table.num_slots, vocab_size, history.tokens)
        self._special = np.zeros(table.num_slots, np.bool_)
        """Slots with a logit rule or log-probabilities. Steps without any need only a token of each row."""
        self._copy = torch.empty(0, vocab_size, device=kernels.device.where)
        """Raw logits of one step; reused, because allocating memory costs more than the copy."""

    def prepare(self) -> None:
        """Compile what a device compiles when it first runs. Before the first request has a slot."""
        run_every_operation(self._kernels, self.rules, self._history.tokens, self._vocab_size)

    def assign(self, slot: int) -> None:
        """Another request gets the slot. The table already has its parameters, and the history its tokens."""
        rule = rule_of_slot(self._table, slot, self._vocab_size)
        self.rules.assign(slot, rule)
        self._special[slot] = rule is not None or self._table.logprobs[slot] != NONE

    def sample(
        self,
        logits: torch.Tensor,
        slots: I32,
        positions: I32,
        grammar: GrammarOutput | None = None,
        drafts: I32 | None = None,
        kept: NDArray[np.bool_] | None = None,
    ) -> SampledTokens:
        """Sample a token after each row, and after each of its drafts as long as these are accepted.

        Args:
            logits: float32[rows + drafts, vocab], changed in place
            slots: int32[rows], slots with the parameters of each row
            positions: int32[rows], the absolute position of each row's first sampled token; the history has the row's
                drafts from this position on
            drafts: int32[rows], number of drafts; None: none
            kept: bool[rows], rows that get tokens; None: all. The others are sampled in vain: that costs less than
                copying the logits of the kept ones.
        """
        none, kernels = np.zeros(len(slots), np.int32), self._kernels
        drafts = none if drafts is None else drafts
        if not len(slots):
            ids = torch.empty(0, dtype=torch.int32, device=kernels.device.where)
            return SampledTokens(ids, none, none, None)
        plain = grammar is None and kept is None
        if plain and not has_any(drafts) and not has_any(self._special[slots]):
            return SampledTokens(self._chosen(logits, slots, positions), none + np.int32(1), none, None)
        mask = None
        if grammar is not None:
            mask = GrammarMask.from_message(grammar, slots, drafts, logits.shape[1])
        rows = SamplePositions.from_rows(slots, positions, drafts)
        slots, positions = rows.slots, rows.positions
        scored = np.flatnonzero(self._table.logprobs[slots] != NONE).astype(np.int32)
        raw, raw_rows = self._raw(logits, slots, scored, mask)
        self.rules.apply(logits, slots, positions)
        if mask is not None and len(mask.rows):
            kernels.sampling.apply_bitmask(logits, mask.rows, mask.words)
        ids = self._chosen(logits, slots, positions)
        acceptable = drafts if mask is None else mask.acceptable
        accepted = rows.accept(kernels.rows, ids, self._history.tokens, acceptable)
        if kept is not None:
            accepted = rows.keep(accepted, kept)
        result = SampledTokens(
            self._picked(ids, np.flatnonzero(accepted.stays)), accepted.counts, accepted.drafted, None
        )
        emitted = accepted.stays[scored]
        scored, raw_rows = scored[emitted], raw_rows[emitted]
        if not len(scored):
            return result
        tops = self._table.logprobs[slots[scored]]
        columns = slots[scored], positions[scored], self._picked(ids, scored), tops
        return result._replace(logprobs=score(kernels.sampling, raw, raw_rows, *columns))

    def _picked(self, ids: torch.Tensor, tokens: NDArray[np.integer[Any]]) -> torch.Tensor:
        """Return the ids of some tokens, in ascending order, int32[some]."""
        if len(tokens) == len(ids):
            return ids
        picked = torch.empty(len(tokens), dtype=torch.int32, device=ids.device)
        (index,) = self._kernels.device.upload(tokens.astype(np.int32))
        self._kernels.device.launch(lambda: torch.index_select(ids, 0, index, out=picked))
        return picked

    def _raw(self, logits: torch.Tensor, slots: I32, scored: I32, mask: GrammarMask | None) -> tuple[torch.Tensor, I32]:
        """Return a tensor that still has the raw logits of `scored` rows after sampling, and the rows in it. Copies if
        sampling changes one of them."""
        if not len(scored):
            return logits, scored
        changes = self.rules.changes(slots)
        if mask is not None:
            changes[mask.rows] = True
        if not changes[scored].any():
            return logits, scored
        if len(scored) > len(self._copy):
            self._copy = self._copy.new_empty(0, logits.shape[1])  # freed before more is allocated
            self._copy = torch.empty(len(scored), logits.shape[1], device=logits.device)
        copy = self._copy[: len(scored)]
        (index,) = self._kernels.device.upload(scored)
        self._kernels.network.gather(index, logits, copy)
        return copy, np.arange(len(scored), dtype=np.int32)

    def _chosen(self, logits: torch.Tensor, slots: I32, positions: I32) -> torch.Tensor:
        """Return a token of each row, int32[rows]."""
        t, temperature = self._table, self._table.temperature[slots]
        if has_all(temperature < GREEDY_BELOW):
            return self._kernels.sampling.greedy(logits)
        columns = temperature, t.min_p[slots], t.top_k[slots], t.top_p[slots], t.seed[slots]
        return self._kernels.sampling.choose(logits, DrawColumns(*columns, positions))
