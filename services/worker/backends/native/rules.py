"""What the request in each slot asks to be changed in its logits, laid out for the kernels.

Nothing is kept for slots without rules, and a slot's next request starts from nothing. Token counts are made from the
token history (state.py) when a row is sampled, so a resumed request counts what it said before, and no step waits for
a token to reach the host.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codec import unpack
from services.worker.backends.native.kernels.rules import RULE, rules_kernel
from services.worker.backends.native.state import TokenHistory
from services.worker.batch.slots import SlotTable

I32 = NDArray[np.int32]
NOBODY = -1
Counts = tuple[I32, I32, I32]
"""int32[vocab] each: places, tokens and counts of `RULE`. Memory is taken as far as it is written; the places are all 0
before a request has them."""


class Rules:
    """One row of rules per slot. For one calling thread."""

    def __init__(self, table: SlotTable, history: TokenHistory, vocab_size: int) -> None:
        self._table, self._history, self._vocab = table, history, vocab_size
        self._kernel = rules_kernel()
        self._rules = np.zeros(table.num_slots, RULE)
        self._has = np.zeros(table.num_slots, np.bool_)
        self._columns: list[list[NDArray[np.generic]]] = [[] for _ in range(table.num_slots)]
        """What the addresses in a slot's rule belong to."""
        self._counts: dict[int, Counts] = {}
        self._spare: list[Counts] = []
        """Zero, of slots whose next request had no penalties."""

    def assign(self, slot: int) -> None:
        """The slot has another request, whose parameters stand in the table; nothing stays of the one before."""
        self._forget(slot)
        table = self._table
        self._has[slot] = table.penalized[slot] or table.edited[slot] or bool(table.banned[slot])
        if not self._has[slot]:
            return
        params, rule = table.params[slot], self._rules[slot]
        rule["num_prompt"] = table.num_prompt[slot]
        if params.allowed_token_ids:
            rule["restricts"] = 1
            self._put(slot, "allowed", np.unique(self._inside(unpack(params.allowed_token_ids))))
        if words := [word for word in params.bad_words if word[-1] < self._vocab]:
            self._point(slot, "words", np.concatenate([np.array(word, np.int32) for word in words]))
            self._put(
                slot, "word_ends", np.cumsum([len(word) for word in words], dtype=np.int32), "num_words"
            )
        if table.banned[slot]:
            self._put(slot, "banned", self._inside(np.array(table.banned[slot], np.int32)))
            rule["banned_until"] = table.banned_until[slot]
        if biases := [(token, bias) for token, bias in params.logit_bias if token < self._vocab]:
            tokens, values = zip(*biases, strict=True)
            self._put(slot, "biased", np.array(tokens, np.int32))
            self._point(slot, "biases", np.array(values, np.float32))
        if table.penalized[slot]:
            counts = self._counts[slot] = self._spare.pop() if self._spare else self._zeros()
            rule["places"], rule["seen"], rule["counts"] = (column.ctypes.data for column in counts)
            rule["repetition"] = params.repetition_penalty
            rule["frequency"], rule["presence"] = params.frequency_penalty, params.presence_penalty

    def changes(self, slots: I32) -> NDArray[np.bool_]:
        """bool[rows]: whose logits `apply` may change."""
        return self._has[slots]

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        """Changes float32[rows, vocab] in place; `positions` are those that the sampled tokens will have. The rows of
        a slot follow one another, and so do their positions: the history has drafts at all but the first.

        Raises: RuntimeError, when a position before them has no token yet (S3-7).
        """
        has = self._has[slots]
        if not has.any():
            return
        begins = np.diff(slots, prepend=np.int32(NOBODY)) != 0
        sizes = np.diff(np.flatnonzero(begins), append=len(slots)).astype(np.int32)[has[begins]]
        rows = np.flatnonzero(begins & has).astype(np.int32)
        slots, positions = slots[rows], positions[rows]
        columns = (column.ctypes.data for column in (rows, sizes, slots, positions, self._rules))
        shape = self._history.shape
        self._kernel.run(
            len(rows),
            (logits.data_ptr(), logits.shape[1], *columns, shape[0], self._history.address, shape[1], 0),
        )
        if strange := int(self._kernel.args["strange"]):
            raise RuntimeError(f"slot {strange - 1} is sampled, but not all positions before have a token")

    # -- the layout of one slot ----------------------------------------------------------------------------------

    def _forget(self, slot: int) -> None:
        if slot in self._counts:
            counts = self._counts.pop(slot)
            places, seen, _ = counts
            places[seen[: self._rules[slot]["num_seen"]]] = 0
            self._spare.append(counts)
        self._rules[slot] = np.zeros((), RULE)
        self._columns[slot].clear()

    def _zeros(self) -> Counts:
        return (
            np.zeros(self._vocab, np.int32),
            np.empty(self._vocab, np.int32),
            np.empty(self._vocab, np.int32),
        )

    def _inside(self, tokens: I32) -> I32:
        """Ids outside the vocabulary are nobody's."""
        return tokens[(tokens >= 0) & (tokens < self._vocab)]

    def _put(self, slot: int, field: str, column: NDArray[np.generic], number: str = "") -> None:
        self._point(slot, field, column)
        self._rules[slot][number or f"num_{field}"] = len(column)

    def _point(self, slot: int, field: str, column: NDArray[np.generic]) -> None:
        self._columns[slot].append(column)
        self._rules[slot][field] = column.ctypes.data
