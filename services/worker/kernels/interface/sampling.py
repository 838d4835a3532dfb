"""Choice and scoring of tokens."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import F32, I32
from services.worker.kernels.interface.logit_rules import LogitRules
from services.worker.sampling import reference


class DrawColumns(NamedTuple):
    """Parameters of each row."""

    temperature: F32
    """Below GREEDY_BELOW, the greatest logit is chosen."""
    min_p: F32
    top_k: I32
    """0: all"""
    top_p: F32
    seed: NDArray[np.uint64]
    position: I32
    """Position of the token to sample. Seed and position determine the noise (services.worker.sampling.noise)."""


class ScoredTokens(NamedTuple):
    """Log-probabilities of each row: its token first, then the most likely tokens in descending order, the lowest id
    first among equals."""

    counts: I32
    """int32[rows]: entries of each row"""
    ids: torch.Tensor
    """int32[entries]"""
    values: torch.Tensor
    """float32[entries], natural logarithms"""
    token_ranks: torch.Tensor
    """int32[rows]: 1 plus the number of logits greater than the token's"""


class SamplingKernels:
    """Sampling from logits. Rows are independent of one another."""

    def logit_rules(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> LogitRules:
        """`history`: int32[slots, limit]"""
        return LogitRules(num_slots, vocab_size, history)

    def apply_bitmask(self, logits: torch.Tensor, rows: I32, words: I32) -> None:
        """Forbid in rows `rows` of float32[any, vocab] all tokens without a bit in `words`, int32[rows, words], least
        significant bit first. If every token with a bit is forbidden already, allow the lowest of them."""
        for row, mask in zip(rows, words, strict=True):
            reference.apply_bitmask(logits[row].numpy(), mask)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the greatest of each row of float32[rows, vocab] as int32[rows]; the lowest id among equals."""
        return logits.argmax(-1).int()

    def choose(self, logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """Return a token of each row, int32[rows]: the greatest logit, or a draw by the row's noise after temperature,
        min-p, top-k and top-p. Tokens that tie with the last one kept are kept; among equal maxima the lowest id wins.
        The logits do not change."""
        ids = torch.empty(len(logits), dtype=torch.int32)
        for row, draw in enumerate(zip(*columns, strict=True)):
            ids[row] = reference.sample_row(logits[row].numpy(), *(value.item() for value in draw))
        return ids

    def logprobs(self, logits: torch.Tensor, rows: I32, tokens: torch.Tensor, tops: I32) -> ScoredTokens:
        """Score tokens by rows `rows` of float32[any, vocab].

        Args:
            tokens: int32[rows], the row's token
            tops: int32[rows], number of most likely tokens, at most vocab

        Returns: tensors that no later call changes.
        """
        scored = [
            reference.logprobs_of(logits[row].numpy(), int(token), int(top))
            for row, token, top in zip(rows, tokens.numpy(), tops, strict=True)
        ]
        return ScoredTokens(
            np.array([len(each.token_ids) for each in scored], np.int32),
            torch.from_numpy(np.concatenate([each.token_ids for each in scored])),
            torch.from_numpy(np.concatenate([each.values for each in scored])),
            torch.tensor([each.token_rank for each in scored], dtype=torch.int32),
        )
