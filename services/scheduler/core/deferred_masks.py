"""Sending the masks of the steps in flight.

A step's sampling waits for the masks of its constrained rows, and a mask can be made when the token before is known
(deferred sampling, docs/invariants.md). So masks are sent in messages of their own, behind the plan. The masks
themselves belong to the requests (`services.scheduler.core.masks`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from protocol.codec import MAX_MESSAGE_BYTES, pack
from protocol.steps import GrammarOutput
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.slots import DELIVER, LIVE, Mask
from services.scheduler.core.store import RequestStore
from services.scheduler.grammar import Masks

MAX_MASK_BYTES = MAX_MESSAGE_BYTES // 2
"""Masks of one message. If the rows of a step have more, the last drafts of each get no mask and are not accepted."""


@dataclass(eq=False)
class DeferredMasks:
    store: RequestStore
    epoch: EpochState
    queue: BatchQueue
    num_words: int
    """int32 words of one mask."""

    @property
    def holds_back(self) -> bool:
        """Return whether no further step may be dispatched before the missing masks are sent."""
        return not self.epoch.limits.leaves_rows_out and bool(self.queue.unmasked)

    def outputs(self) -> Iterator[GrammarOutput]:
        """Yield the masks that can be sent, step by step, and start to make others whose tokens before are known."""
        for step, sampled_before in self.unmasked_steps():
            if (grammar := self.grammar_output(step, sampled_before)) is not None:
                yield grammar

    def start(self) -> None:
        """Start to make the masks of all rows whose tokens before are known."""
        for step, sampled_before in self.unmasked_steps():
            used, late = self.used_rows(step, sampled_before)
            for slot, row in step.unmasked.items():
                if used[row] and not late[row]:
                    self.store.masks.get(self.epoch.slots.request(slot), step.drafts.item(row), self.num_words)

    def unmasked_steps(self) -> Iterator[tuple[InflightStep, Mask]]:
        """Yield the steps with unsent masks, in order, each with bool[slots]: whether an earlier step in flight samples
        for the slot's present generation."""
        if not self.queue.unmasked:
            return
        sampled = np.zeros(self.epoch.slots.num_slots, np.bool_)
        for step in self.queue.steps:
            if step.unmasked:
                yield step, sampled
            sampled[step.slots[step.samples & self.epoch.ledger.current(step)]] = True

    def grammar_output(self, step: InflightStep, sampled_before: Mask) -> GrammarOutput | None:
        """Return the masks of a step that can be sent now, which it has no more. None: there are none.

        A row whose slot is sampled by an earlier step in flight has to wait, because its grammar has not accepted that
        token yet. A row with drafts has a mask for each position that a draft within the grammar leads to (draft
        masks). A row whose result will be ignored may sample anything. Workers that leave no row out get the masks of
        all rows in one message.

        Args:
            sampled_before: bool[slots]: an earlier step in flight samples for the slot.
        """
        unmasked, whole = step.unmasked, not self.epoch.limits.leaves_rows_out
        used, late = self.used_rows(step, sampled_before)
        most = max(1, MAX_MASK_BYTES // max(1, 4 * self.num_words * len(unmasked)))
        parts = {}
        for slot, row in unmasked.items():
            if late[row]:
                if whole:
                    return None
            elif (masks := self.row_masks(slot, step.drafts.item(row), used[row])) is not None:
                parts[slot] = masks[:most]
        if not parts or (whole and len(parts) < len(unmasked)):
            return None
        for slot in parts:
            del unmasked[slot]
        return GrammarOutput(
            self.epoch.number,
            step.step_id,
            pack(list(parts)),
            np.concatenate(list(parts.values())).view(np.uint8).reshape(-1).data,
            pack([len(masks) for masks in parts.values()]) if step.drafts.any() else b"",
        )

    def used_rows(self, step: InflightStep, sampled_before: Mask) -> tuple[list[bool], list[bool]]:
        """Return for each row of the step whether its tokens will be appended to a request, and whether the token
        before such a row is in flight."""
        states = self.epoch.slots.state[step.slots]
        used = self.epoch.ledger.current(step) & ((states == LIVE) | (states == DELIVER))
        return used.tolist(), (used & sampled_before[step.slots]).tolist()

    def row_masks(self, slot: int, num_drafts: int, used: bool) -> Masks | None:
        """Return the masks of one row, or None while they are being made."""
        if not used:
            return np.full((1, self.num_words), -1, np.int32)
        masks = self.store.masks.get(self.epoch.slots.request(slot), num_drafts, self.num_words)
        return masks if masks is None or len(masks) <= 1 + num_drafts else masks[: 1 + num_drafts]
