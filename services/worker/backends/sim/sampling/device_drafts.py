"""Proposed drafts on the device, by slot, until the slot's next row takes them."""

import numpy as np

from protocol.steps import NO_DRAFT
from services.worker.backends.sim.model.oracle import OracleError, first_true, spread
from services.worker.batch.slots import I32

_NOTHING = np.empty(0, np.int32)


class DeviceDrafts:
    """The drafts that were proposed after the newest token of each slot.

    Args:
        most: largest number of drafts per slot.
    """

    def __init__(self, num_slots: int, most: int) -> None:
        self.most = most
        self.tokens = np.full((num_slots, most), NO_DRAFT, np.int32)
        self.firsts = np.zeros(num_slots, np.int32)
        """Position of the first draft."""
        self._counts = np.zeros(num_slots, np.int32)
        self._requested = np.zeros(num_slots, np.int32)
        self._steps = np.zeros(num_slots, np.int32)
        """Step that proposed them."""

    def put(self, step_id: int, slots: I32, firsts: I32, tokens: I32) -> None:
        """Store int32[rows, requested] drafts; NO_DRAFT from the end of a row's drafts on."""
        requested = tokens.shape[1]
        self.tokens[slots, :requested], self.firsts[slots], self._steps[slots] = tokens, firsts, step_id
        self._counts[slots] = (tokens != NO_DRAFT).cumprod(1).sum(1)
        self._requested[slots] = requested

    def take(self, slots: I32, firsts: I32, planned: I32) -> tuple[I32, I32]:
        """Remove the drafts of rows and return them. The first row of a request, for which none are planned, removes
        those of the slot's last owner.

        Args:
            firsts: int32[rows], position of each row's first draft.
            planned: int32[rows], largest number of drafts of each row.

        Returns:
            int32[rows], the number of drafts of each row, and their tokens, rows back to back.

        Raises: OracleError, if drafts were proposed for another position, or fewer were requested than are planned
            (latest drafts).
        """
        if not self.most:
            return planned, _NOTHING
        available, requested = self._counts[slots], self._requested[slots]
        self._counts[slots] = self._requested[slots] = 0
        if not planned.any():
            return planned, _NOTHING
        counts = np.minimum(planned, available)
        wrong = (planned > requested) | ((counts > 0) & (self.firsts[slots] != firsts))
        if (i := first_true(wrong)) is not None:
            raise OracleError(
                f"latest drafts: slot {slots[i]} is planned with {planned[i]} drafts from position {firsts[i]} on, but "
                f"step {self._steps[slots[i]]} proposed {requested[i]}, from {self.firsts[slots[i]]} on"
            )
        rows, offsets = spread(np.zeros_like(counts), counts)
        return counts, self.tokens[slots[rows], offsets]
