"""Columns by slot that only the device has: the request's true position, and its drafts.

The host plans as if every draft were accepted and no row were left out (true position, docs/invariants.md). A step's
rows are brought to their true positions here, once, before anything is computed from them (settle once). Ranks that
neither embed nor sample tokens receive the true positions from the stage before.

Without speculation only constrained rows that sample can be elsewhere than planned, because no other row is left out.
"""

from dataclasses import replace

import numpy as np
import torch

from protocol.columns import has_any
from protocol.steps import NO_DRAFT
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import EMPTY, I32, PlanError, Rows
from services.worker.kernels.interface.rows import RowKernels, SlotDrafts


def positions_message(rows: Rows) -> torch.Tensor:
    """int32[2, rows]: starts and drafts of settled rows, for the next stage."""
    return torch.from_numpy(np.stack((rows.starts, rows.drafts)))


def rows_from_message(planned: Rows, message: torch.Tensor) -> Rows:
    """Return the plan's rows at the positions that the stage before has sent."""
    starts, drafts = message.numpy()
    counts = planned.counts - planned.drafts + drafts
    return replace(planned, starts=starts, counts=counts, drafts=drafts)


class DraftTable:
    """One row per slot.

    Args:
        most: maximum number of drafts of a row; 0: no speculation.
    """

    def __init__(self, num_slots: int, most: int, vocab_size: int, kernels: RowKernels) -> None:
        self._most, self._vocab_size, self._kernels = most, vocab_size, kernels
        self.slots = SlotDrafts(
            frontier=np.full(num_slots, EMPTY, np.int32),
            proposed=np.zeros(num_slots, np.int32),
            tokens=np.full((num_slots, most), NO_DRAFT, np.int32),
        )
        """The drafts were proposed by the slot's latest sampling step (latest drafts)."""
        self._frontier, self._proposed, self._tokens = self.slots

    @property
    def speculates(self) -> bool:
        return self._most > 0

    def assign(self, slot: int) -> None:
        """Another request gets the slot; drop the state of the one before."""
        self._frontier[slot], self._proposed[slot] = EMPTY, 0

    def settle(self, rows: Rows, history: TokenHistory, masked: I32) -> Rows:
        """Return the rows at their true positions, with the drafts that their slots have; writes these to the history.

        Args:
            masked: int32[constrained rows that sample], their slots.

        Raises: PlanError, if a row is planned before its request's true position (position bound), or has drafts
            although there is no speculation.
        """
        if self._most:
            return self._settled(rows, history)
        if has_any(rows.drafts):
            raise PlanError("the plan has drafts, but this group was assigned no speculation")
        if not len(masked):
            return rows
        constrained, starts = np.zeros(len(self._frontier), np.bool_), rows.starts.copy()
        constrained[masked] = True
        some = constrained[rows.slots]
        starts[some] = self._settled(rows.select(some), history).starts
        return replace(rows, starts=starts)

    def _settled(self, rows: Rows, history: TokenHistory) -> Rows:
        settled, bad = self._kernels.settle(rows, self.slots, history.tokens)
        if settled is None:
            slot, start = rows.slots[bad], rows.starts[bad]
            raise PlanError(f"slot {slot}: planned from {start} on, but it is at {self._frontier[slot]}")
        return settled

    def advance(self, slots: I32, firsts: I32, counts: I32) -> None:
        """Move the true positions of slots behind `counts` tokens that were sampled from position `firsts` on;
        int32[sampling rows] each. The last of these tokens is not computed yet, the drafts before it are. A row without
        a token goes back to the last known token."""
        self._frontier[slots] = firsts + counts - 1

    def propose(self, slots: I32, tokens: I32) -> None:
        """Store the drafts of the slots' next rows, int32[sampling rows, up to `most`], padded with NO_DRAFT.

        Raises: RuntimeError, for an id outside the vocabulary (valid ids), or too many drafts.
        """
        width = tokens.shape[1]
        if not width:
            return
        if width > self._most or tokens.min(initial=0) < NO_DRAFT or tokens.max(initial=0) >= self._vocab_size:
            raise RuntimeError(
                f"{width} drafts of up to {self._most} for slots {slots.tolist()}, or not of the vocabulary: "
                f"{tokens.tolist()}"
            )
        self._tokens[slots, :width] = tokens
        self._proposed[slots] = np.minimum.accumulate(tokens != NO_DRAFT, axis=1).sum(1)
