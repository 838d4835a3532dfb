"""The rule of every slot as a record with addresses, for the kernel that applies the rules.

A slot without a rule has no arrays. Tokens are counted in the token history when a row is sampled, so the output before
a preemption is counted too, and no step waits until a token has reached the host.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.kernels.cpu.compiled.logit_rules import RULE, rules_kernel
from services.worker.kernels.interface.arrays import I32
from services.worker.kernels.interface.logit_rules import LogitRule

_NO_SLOT = -1
Counts = tuple[I32, I32, I32]
"""int32[vocab] each: `places`, `seen` and `counts` of `RULE`. The system allocates only the pages that are written. All
places are 0 before a request uses them."""


class CpuLogitRules:
    """`LogitRules`. For one calling thread."""

    def __init__(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> None:
        self._vocab, self._history = vocab_size, history
        self._kernel = rules_kernel()
        self._rules = np.zeros(num_slots, RULE)
        self._has = np.zeros(num_slots, np.bool_)
        self._columns: list[list[NDArray[np.generic]]] = [[] for _ in range(num_slots)]
        """Arrays whose addresses stand in the slot's record."""
        self._counts: dict[int, Counts] = {}
        self._spare: list[Counts] = []
        """Arrays of slots whose next request had no penalties; their places are all 0."""

    @property
    def counting(self) -> int:
        """Slots whose tokens are counted; each has three arrays with a number per token of the vocabulary."""
        return len(self._counts)

    def assign(self, slot: int, rule: LogitRule | None) -> None:
        self._clear(slot)
        self._has[slot] = rule is not None
        if rule is None:
            return
        record = self._rules[slot]
        record["num_prompt"] = rule.num_prompt
        if rule.allowed is not None:
            record["restricts"] = 1
            self._put(slot, "allowed", rule.allowed)
        if rule.bad_words:
            ends = np.cumsum([len(word) for word in rule.bad_words], dtype=np.int32)
            self._point(slot, "words", np.concatenate(rule.bad_words))
            self._put(slot, "word_ends", ends, "num_words")
        if rule.banned is not None:
            self._put(slot, "banned", rule.banned)
            record["banned_until"] = rule.banned_until
        if rule.biased is not None and rule.biases is not None:
            self._put(slot, "biased", rule.biased)
            self._point(slot, "biases", rule.biases)
        if rule.penalizes:
            counts = self._counts[slot] = self._spare.pop() if self._spare else self._zeros()
            record["places"], record["seen"], record["counts"] = (column.ctypes.data for column in counts)
            record["repetition"] = rule.repetition
            record["frequency"], record["presence"] = rule.frequency, rule.presence

    def changes(self, slots: I32) -> NDArray[np.bool_]:
        return self._has[slots]

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        has = self._has[slots]
        if not has.any():
            return
        begins = np.diff(slots, prepend=np.int32(_NO_SLOT)) != 0
        sizes = np.diff(np.flatnonzero(begins), append=len(slots)).astype(np.int32)[has[begins]]
        rows = np.flatnonzero(begins & has).astype(np.int32)
        slots, positions = slots[rows], positions[rows]
        columns = (column.ctypes.data for column in (rows, sizes, slots, positions, self._rules))
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
            places[seen[: self._rules[slot]["num_seen"]]] = 0
            self._spare.append(counts)
        self._rules[slot] = np.zeros((), RULE)
        self._columns[slot].clear()

    def _zeros(self) -> Counts:
        return (np.zeros(self._vocab, np.int32), np.empty(self._vocab, np.int32), np.empty(self._vocab, np.int32))

    def _put(self, slot: int, field: str, column: NDArray[np.generic], number: str = "") -> None:
        self._point(slot, field, column)
        self._rules[slot][number or f"num_{field}"] = len(column)

    def _point(self, slot: int, field: str, column: NDArray[np.generic]) -> None:
        self._columns[slot].append(column)
        self._rules[slot][field] = column.ctypes.data
