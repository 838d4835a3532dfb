"""The rule of every slot as a record with addresses, for the kernel that applies the rules.

A slot without a rule has no arrays. Tokens are counted in the token history when a row is sampled, so the output before
a preemption is counted too, and no step waits until a token has reached the host.
"""

import numpy as np
import torch

from protocol.columns import I32
from services.worker.kernels.cpu.compiled.logit_rules import RULE, rules_kernel
from services.worker.kernels.interface.logit_rules import LogitRule, LogitRules

_NO_SLOT = -1
Counts = tuple[I32, I32, I32]
"""int32[vocab] each: `places`, `seen` and `counts` of `RULE`. The system allocates only the pages that are written. All
places are 0 before a request uses them."""


class CpuLogitRules(LogitRules):
    """For one calling thread."""

    def __init__(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> None:
        super().__init__(num_slots, vocab_size, history)
        self._kernel = rules_kernel()
        self._records = np.zeros(num_slots, RULE)
        self._words: dict[int, tuple[I32, I32]] = {}
        """Bad words back to back, and their ends. The other addresses in a slot's record are those of its rule."""
        self._counts: dict[int, Counts] = {}
        self._spare: list[Counts] = []
        """Arrays of slots whose next request had no penalties; their places are all 0."""

    @property
    def counting(self) -> int:
        """Slots whose tokens are counted; each has three arrays with a number per token of the vocabulary."""
        return len(self._counts)

    def assign(self, slot: int, rule: LogitRule | None) -> None:
        self._clear(slot)
        super().assign(slot, rule)
        if rule is None:
            return
        record = self._records[slot]
        record["num_prompt"] = rule.num_prompt
        if rule.allowed is not None:
            record["restricts"] = 1
            record["allowed"], record["num_allowed"] = rule.allowed.ctypes.data, len(rule.allowed)
        if rule.bad_words:
            ends = np.cumsum([len(word) for word in rule.bad_words], dtype=np.int32)
            words, _ = self._words[slot] = np.concatenate(rule.bad_words), ends
            record["words"], record["word_ends"], record["num_words"] = words.ctypes.data, ends.ctypes.data, len(ends)
        if rule.banned is not None:
            record["banned"], record["num_banned"] = rule.banned.ctypes.data, len(rule.banned)
            record["banned_until"] = rule.banned_until
        if rule.biased is not None and rule.biases is not None:
            record["biased"], record["num_biased"] = rule.biased.ctypes.data, len(rule.biased)
            record["biases"] = rule.biases.ctypes.data
        if rule.penalizes:
            counts = self._counts[slot] = self._spare.pop() if self._spare else self._zeros()
            record["places"], record["seen"], record["counts"] = (column.ctypes.data for column in counts)
            record["repetition"] = rule.repetition
            record["frequency"], record["presence"] = rule.frequency, rule.presence

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        has = self._has_rule[slots]
        if not has.any():
            return
        begins = np.diff(slots, prepend=np.int32(_NO_SLOT)) != 0
        sizes = np.diff(np.flatnonzero(begins), append=len(slots)).astype(np.int32)[has[begins]]
        rows = np.flatnonzero(begins & has).astype(np.int32)
        slots, positions = slots[rows], positions[rows]
        columns = (column.ctypes.data for column in (rows, sizes, slots, positions, self._records))
        num_slots, limit = self._history.shape
        self._kernel.run(
            len(rows), (logits.data_ptr(), logits.shape[1], *columns, num_slots, self._history.data_ptr(), limit, 0)
        )
        if missing := int(self._kernel.args["missing"]):
            raise RuntimeError(f"slot {missing - 1} is sampled, but not all positions before have a token")

    # -- the record of one slot ----------------------------------------------------------------------------------

    def _clear(self, slot: int) -> None:
        if slot in self._counts:
            counts = self._counts.pop(slot)
            places, seen, _ = counts
            places[seen[: self._records[slot]["num_seen"]]] = 0
            self._spare.append(counts)
        self._records[slot] = np.zeros((), RULE)
        self._words.pop(slot, None)

    def _zeros(self) -> Counts:
        return (np.zeros(self._vocab, np.int32), np.empty(self._vocab, np.int32), np.empty(self._vocab, np.int32))
