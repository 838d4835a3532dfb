"""Rules of slots. Each step uploads what its rows need; tokens are read from the history on the device."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import triton

from protocol.columns import F32, I32
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cuda.compiled.logit_rules import (
    bias_kernel,
    count_kernel,
    forbid_words_kernel,
    mask_kernel,
    penalize_kernel,
)
from services.worker.kernels.interface.logit_rules import LogitRule, LogitRules

_AT_ONCE = 1024
_WORD = 32
"""Tokens of a bad word that are compared at once."""
_ROWS_COUNTED = 64
"""Rows whose tokens are counted at once: their counts take 32 MiB for a vocabulary of 128 Ki tokens."""


class _Row(NamedTuple):
    """A row whose logits change."""

    number: int
    slot: int
    position: int
    rule: LogitRule


class CudaLogitRules(LogitRules):
    """A position without a token is not counted."""

    def __init__(self, num_slots: int, vocab_size: int, history: torch.Tensor, device: ComputeDevice) -> None:
        super().__init__(num_slots, vocab_size, history)
        self._device = device
        self._masks: dict[int, I32] = {}
        """int32[words] of slots with allowed tokens"""
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device.where)
        """Zero between two steps."""

    def assign(self, slot: int, rule: LogitRule | None) -> None:
        super().assign(slot, rule)
        self._masks.pop(slot, None)
        if rule is not None and rule.allowed is not None:
            self._masks[slot] = _bitmask(rule.allowed, self._vocab)

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        rows = list(self._rows(slots, positions))
        self._mask(logits, [row for row in rows if row.slot in self._masks])
        self._forbid_words(logits, rows)
        self._add_biases(logits, rows)
        penalized = [row for row in rows if row.rule.penalizes]
        for first in range(0, len(penalized), _ROWS_COUNTED):
            self._penalize(logits, penalized[first : first + _ROWS_COUNTED])

    def _rows(self, slots: I32, positions: I32) -> Iterator[_Row]:
        for number in np.flatnonzero(self._has_rule[slots]).tolist():
            slot = int(slots[number])
            if (rule := self._rules[slot]) is not None:
                yield _Row(number, slot, int(positions[number]), rule)

    def _mask(self, logits: torch.Tensor, rows: list[_Row]) -> None:
        if not rows:
            return
        masks = np.stack([self._masks[row.slot] for row in rows])
        which, words = self._device.upload(np.array([row.number for row in rows], np.int32), masks)
        sizes = self._vocab, masks.shape[1]
        mask_kernel[(len(rows),)](logits, which, words, *sizes, keeps_one=False, at_once=_AT_ONCE)

    def _forbid_words(self, logits: torch.Tensor, rows: list[_Row]) -> None:
        """A word counts if the output is long enough for all of its tokens but the last."""
        found = [
            (row, word)
            for row in rows
            for word in row.rule.bad_words
            if len(word) - 1 <= row.position - row.rule.num_prompt
        ]
        if not found:
            return
        sizes = np.array([len(word) for _, word in found], np.int32)
        columns = np.array([(row.number, row.slot, row.position) for row, _ in found], np.int32).T.copy()
        tokens = np.concatenate([word for _, word in found])
        uploaded = self._device.upload(*columns, np.cumsum(sizes, dtype=np.int32) - sizes, sizes, tokens)
        limits = self._vocab, self._history.shape[1]
        forbid_words_kernel[(len(found),)](logits, *uploaded, self._history, *limits, at_once=_WORD)

    def _add_biases(self, logits: torch.Tensor, rows: list[_Row]) -> None:
        """Add biases; a banned token has one of minus infinity."""
        lists: list[tuple[int, I32, F32]] = []
        for number, _, position, rule in rows:
            if rule.banned is not None and position < rule.banned_until:
                lists.append((number, rule.banned, np.full(len(rule.banned), -np.inf, np.float32)))
            if rule.biased is not None and rule.biases is not None:
                lists.append((number, rule.biased, rule.biases))
        if entries := sum(len(tokens) for _, tokens, _ in lists):
            numbers, *columns = zip(*lists, strict=True)
            which = np.repeat(numbers, [len(tokens) for _, tokens, _ in lists]).astype(np.int32)
            uploaded = self._device.upload(which, *map(np.concatenate, columns))
            bias_kernel[(triton.cdiv(entries, _AT_ONCE),)](logits, *uploaded, entries, self._vocab, at_once=_AT_ONCE)

    def _penalize(self, logits: torch.Tensor, rows: list[_Row]) -> None:
        most = max(row.position for row in rows)
        if not most:
            return
        if len(self._counts) < len(rows):
            self._counts = self._counts.new_empty(0, self._vocab)  # freed before more is allocated
            sizes = len(rows), self._vocab
            self._counts = torch.zeros(sizes, dtype=torch.int32, device=self._device.where)
        integers = [(row.number, row.slot, row.position, row.rule.num_prompt) for row in rows]
        floats = [(row.rule.repetition, row.rule.frequency, row.rule.presence) for row in rows]
        columns = *np.array(integers, np.int32).T.copy(), *np.array(floats, np.float32).T.copy()
        which, slots, positions, prompts, *penalties = self._device.upload(*columns)
        limits = self._vocab, self._history.shape[1]
        grid = len(rows), triton.cdiv(most, _AT_ONCE)
        count_kernel[grid](slots, positions, prompts, self._history, self._counts, *limits, at_once=_AT_ONCE)
        penalize_kernel[grid](
            *(logits, which, slots, positions, *penalties, self._history, self._counts, *limits), at_once=_AT_ONCE
        )


def counts_bytes(rows: int, vocab_size: int) -> int:
    """Return the memory in which the tokens before rows with penalties are counted."""
    return 4 * min(rows, _ROWS_COUNTED) * vocab_size


def _bitmask(allowed: I32, vocab_size: int) -> I32:
    """int32[ceil(vocab / 32)], least significant bit first"""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[allowed] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
