"""From logits to tokens, one row after the other, by the functions of `services.worker.sampling.reference`."""

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.kernels.interface.arrays import I32
from services.worker.kernels.interface.logit_rules import LogitRule, LogitRules
from services.worker.kernels.interface.sampling import DrawColumns, ScoredTokens
from services.worker.sampling import reference
from services.worker.sampling.noise import gumbel


class ReferenceSampling:
    """`SamplingKernels`"""

    def logit_rules(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> LogitRules:
        return ReferenceLogitRules(num_slots, vocab_size, history)

    def apply_bitmask(self, logits: torch.Tensor, rows: I32, words: I32) -> None:
        for row, mask in zip(rows, words, strict=True):
            reference.apply_bitmask(logits[row].numpy(), mask)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1).int()

    def choose(self, logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        ids = torch.zeros(len(logits), dtype=torch.int32)
        for row, (temperature, min_p, top_k, top_p, seed, position) in enumerate(zip(*columns, strict=True)):
            values = logits[row].numpy()
            if temperature < reference.GREEDY_BELOW:
                ids[row] = int(values.argmax())
                continue
            kept = reference.restrict(values / temperature, int(top_k), float(top_p), float(min_p))
            left = np.flatnonzero(kept > reference.NEVER)
            if len(left):
                ids[row] = int(left[(kept[left] + _noise(seed, position, left)).argmax()])
        return ids

    def logprobs(self, logits: torch.Tensor, rows: I32, tokens: torch.Tensor, tops: I32) -> ScoredTokens:
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


class ReferenceLogitRules:
    """`LogitRules`; what a rule looks at is counted anew for every row."""

    def __init__(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> None:
        self._vocab, self._history = vocab_size, history
        self._rules: list[LogitRule | None] = [None] * num_slots

    def assign(self, slot: int, rule: LogitRule | None) -> None:
        self._rules[slot] = rule

    def changes(self, slots: I32) -> NDArray[np.bool_]:
        return np.array([self._rules[slot] is not None for slot in slots], np.bool_)

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            if (rule := self._rules[slot]) is not None:
                tokens = self._history[slot, :position].numpy()
                if rule.penalizes and ((tokens < 0) | (tokens >= self._vocab)).any():
                    raise RuntimeError(f"slot {slot} is sampled, but not all positions before have a token")
                _change(logits[row].numpy(), rule, tokens, position)


def _change(row: NDArray[np.float32], rule: LogitRule, tokens: I32, position: int) -> None:
    """In place; `tokens` are all before the position."""
    prompt, output = tokens[: rule.num_prompt], tokens[rule.num_prompt :]
    if rule.allowed is not None:
        reference.allow_only(row, rule.allowed)
    words = tuple(tuple(word.tolist()) for word in rule.bad_words)
    reference.forbid(row, reference.ends_of_bad_words(words, output))
    if rule.banned is not None and position < rule.banned_until:
        reference.forbid(row, tuple(rule.banned.tolist()))
    if rule.biased is not None and rule.biases is not None:
        reference.add_bias(row, tuple(zip(rule.biased.tolist(), rule.biases.tolist(), strict=True)))
    if rule.penalizes:
        _penalize(row, rule, prompt, output)


def _penalize(row: NDArray[np.float32], rule: LogitRule, prompt: I32, output: I32) -> None:
    """Repetition for the tokens of prompt and output, then frequency and presence for those of the output."""
    emitted, counts = np.unique(output, return_counts=True)
    seen, repetition = np.union1d(prompt, emitted), np.float32(rule.repetition)
    row[seen] = np.where(row[seen] > 0, row[seen] / repetition, row[seen] * repetition)
    row[emitted] -= np.float32(rule.frequency) * counts.astype(np.float32)
    row[emitted] -= np.float32(rule.presence)


def _noise(seed: np.uint64, position: np.int32, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """float32[tokens]"""
    return gumbel(np.array([seed]), np.array([position]), tokens)[0]
