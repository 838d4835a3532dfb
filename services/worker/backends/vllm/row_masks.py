"""The masks that a step is sampled with, and its rows that are left out (left-out row, docs/invariants.md)."""

import numpy as np

from protocol.codec import unpack
from protocol.steps import GrammarOutput
from services.worker.batch.masks import GrammarMask
from services.worker.batch.slots import I32, Rows

LEFT_OUT = ALL_ALLOWED = -1
"""A word of a bitmask that allows every token has the same value."""


class RowMasks:
    """Masks of the constrained rows of a step; rows are left out unless `add` brings their masks.

    vLLM expects one mask for every draft of a row and one more. Missing ones allow every token, and the drafts behind
    them are not accepted: acceptable drafts (docs/invariants.md).

    Args:
        slots: int32[constrained rows], in the order of the plan
        rows: of the step, at their true positions
    """

    def __init__(self, slots: I32, rows: Rows, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows = np.flatnonzero(np.isin(rows.slots, slots))
        """int[constrained rows]: their indices among the rows of the step."""
        self.slots, self._drafts = rows.slots[self.rows], rows.drafts[self.rows]
        number, words = len(self.rows), -(-vocab_size // 32)
        self.numbers = np.full(number + int((self._drafts + 1).sum()) * words, ALL_ALLOWED, np.int32)
        """All that follows, in memory that ranks exchange; its size follows from the plan (plan agreement)."""
        self.acceptable = self.numbers[:number]
        """int32[constrained rows]: largest number of drafts to accept; LEFT_OUT: the row is not sampled."""
        self.bitmask = self.numbers[number:].reshape(-1, words)
        """int32[masks, words]: those of a row one after the other."""

    def add(self, grammar: GrammarOutput) -> None:
        """Raises: ProtocolError"""
        mask = GrammarMask.from_message(grammar, self.slots, self._drafts, self._vocab_size)
        self.bitmask[mask.rows] = mask.words
        sampled = np.isin(self.slots, unpack(grammar.slots))
        self.acceptable[sampled] = mask.acceptable[sampled]
