"""What the device knows of every slot that the host does not: how far its request really is, and its drafts.

The host plans as if every draft were accepted, at any depth (spec 2(b) 5). A step's rows are brought to their true
positions here, once, before anything is computed from them; whatever comes after sees no others. Ranks that neither
take tokens in nor sample them are told, by the stage before them.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.steps import NO_DRAFT
from services.worker.backends.native.kernels.ragged import settle
from services.worker.backends.native.state import TokenHistory
from services.worker.batch.slots import EMPTY, PlanError, Rows

I32 = NDArray[np.int32]


def told(rows: Rows) -> torch.Tensor:
    """int32[2, rows]: what of settled rows is not in the plan, for the next stage."""
    return torch.from_numpy(np.stack((rows.starts, rows.drafts)))


def as_told(planned: Rows, message: torch.Tensor) -> Rows:
    """The plan's rows as the stage before has settled them."""
    starts, drafts = message.numpy()
    counts = planned.counts - planned.drafts + drafts
    return Rows(planned.slots, planned.generations, starts, counts, planned.samples, drafts)


class Drafts:
    """One row per slot.

    Args:
        most: drafts of a row; 0: no speculation, and the host's positions are the true ones.
    """

    def __init__(self, num_slots: int, most: int, vocab_size: int) -> None:
        self._most, self._vocab_size = most, vocab_size
        self._frontier = np.full(num_slots, EMPTY, np.int32)
        """Where the next row starts; EMPTY before the first."""
        self._tokens = np.full((num_slots, most), NO_DRAFT, np.int32)
        self._proposed = np.zeros(num_slots, np.int32)
        """Drafts for the next row, by the slot's latest sampling step (S2-6)."""

    @property
    def speculates(self) -> bool:
        return self._most > 0

    def assign(self, slot: int) -> None:
        """The slot has another request; nothing stays of the one before."""
        self._frontier[slot], self._proposed[slot] = EMPTY, 0

    def settle(self, rows: Rows, history: TokenHistory) -> Rows:
        """The rows where they really stand, with as many drafts as there are; these are in the history then.

        Raises: PlanError, when a row is planned before its request's position (S2-5), or has drafts that nobody makes.
        """
        if not self._most:
            if rows.drafts.any():
                raise PlanError("the plan has drafts, but this group was not told how they are proposed")
            return rows
        starts, counts, drafts, bad = settle(
            *(rows.slots, rows.starts, rows.counts, rows.drafts),
            *(self._frontier, self._proposed, self._tokens, history.array),
        )
        if bad >= 0:
            slot, start = rows.slots[bad], rows.starts[bad]
            raise PlanError(f"slot {slot}: planned from {start} on, but it is at {self._frontier[slot]}")
        return Rows(rows.slots, rows.generations, starts, counts, rows.samples, drafts)

    def advance(self, slots: I32, firsts: I32, counts: I32) -> None:
        """So many tokens were sampled from position `firsts` on; int32[sampling rows] each. The last one is not
        computed yet, the drafts before it are."""
        if self._most:
            self._frontier[slots] = firsts + counts - 1

    def propose(self, slots: I32, tokens: I32) -> None:
        """int32[sampling rows, up to `most`] for their next rows; NO_DRAFT from where there are no more.

        Raises: RuntimeError, for what is no token (S2-4), or too many.
        """
        width = tokens.shape[1]
        if not width:
            return
        if (
            width > self._most
            or tokens.min(initial=0) < NO_DRAFT
            or tokens.max(initial=0) >= self._vocab_size
        ):
            raise RuntimeError(
                f"{width} drafts of up to {self._most} for slots {slots.tolist()}, or not of the vocabulary: "
                f"{tokens.tolist()}"
            )
        self._tokens[slots, :width] = tokens
        self._proposed[slots] = np.minimum.accumulate(tokens != NO_DRAFT, axis=1).sum(1)
