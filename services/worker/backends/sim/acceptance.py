"""Which drafts of a step are accepted: those that are what the target samples at their position.

Each position of a row is sampled as it would be without drafts, by the same parameters, noise and history. The drafts
before the first that differs are accepted, and the token that differs is the recovered one, or behind all drafts the
bonus. So tokens and log-probabilities are those of no speculation, whatever is proposed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.steps import NO_DRAFT
from services.worker.backends.sim.device import Device, Event
from services.worker.backends.sim.oracle import Oracle, spread
from services.worker.backends.sim.sampler import Masks, Places, Sampler, Wishes
from services.worker.batch.slots import I32, Rows

MOST = np.iinfo(np.int32).max


@dataclass(frozen=True)
class CopiedTokens:
    """Of a step's sampled rows on the host, valid when the event of their copies has passed."""

    slots: I32
    generations: I32
    room: I32
    """Tokens that each row may have at most."""
    token_ids: I32
    """int32[sum(room)]: the first of each row's are its own."""
    counts: I32
    drafted: I32

    def ragged(self) -> I32:
        """int32[sum(counts)], rows back to back."""
        if len(self.token_ids) == len(self.counts):
            return self.token_ids
        rows, offsets = spread(np.zeros_like(self.room), self.room)
        return self.token_ids[offsets < self.counts[rows]]


class Acceptance:
    """Of one step, in device memory of this step alone (S3-8). The host lays it out when it launches the step, with
    room for all planned drafts; how many there are and how many hold, only the device knows (S2-8).

    Attributes:
        begins: int64[rows], where each row's tokens begin in `token_ids`
        firsts: int32[rows], position of the first token that the row samples; `counts[i]` of them hold
    """

    def __init__(self, rows: Rows) -> None:
        self.rows = np.flatnonzero(rows.samples)
        self._generations = rows.generations[self.rows]
        self.slots, self.room = rows.slots[self.rows], 1 + rows.drafts[self.rows]
        ends = np.cumsum(self.room, dtype=np.int64)
        self.begins = ends - self.room
        self.token_ids = np.full(ends[-1] if len(ends) else 0, NO_DRAFT, np.int32)
        self.firsts, self._drafts, self.counts, self.drafted = np.zeros((4, len(ends)), np.int32)

    @property
    def frontiers(self) -> I32:
        """int32[rows]: how far each slot has come, and where its last token stands."""
        return self.firsts + self.counts - 1

    def begin(self, firsts: I32, drafts: I32) -> None:
        """On the device, int32[rows of the plan] each, when it knows what the step's rows are."""
        self.firsts[:], self._drafts[:] = firsts[self.rows], drafts[self.rows]

    def run(self, sampler: Sampler, oracle: Oracle, wishes: Wishes, masks: Masks) -> None:
        """On the device, when the positions of all drafts are computed."""
        if len(self.token_ids) == len(self.slots):
            self._sample(sampler, oracle, wishes, masks)
        else:
            self._verify(sampler, oracle, wishes, masks)
        oracle.settle(self.slots, self.frontiers, self.token_ids[self.begins + self.counts - 1])

    def _sample(self, sampler: Sampler, oracle: Oracle, wishes: Wishes, masks: Masks) -> None:
        """No draft is planned: what `_verify` comes to then, in a fraction of the time."""
        hashes = oracle.chain[self.slots, self.firsts]
        at = Places(np.arange(len(self.slots)), self.rows, self.slots, self.firsts, hashes)
        self.token_ids[:] = sampler.sample(at, wishes, {row: mask[0] for row, mask in masks.of.items()})
        self.counts[:] = 1

    def _verify(self, sampler: Sampler, oracle: Oracle, wishes: Wishes, masks: Masks) -> None:
        self.drafted[:] = masks.acceptable(self._drafts)
        owners, positions = spread(self.firsts, self.drafted + 1)
        slots, offsets = self.slots[owners], positions - self.firsts[owners]
        at = Places(owners, self.rows[owners], slots, positions, oracle.chain[slots, positions])
        begins = np.cumsum(self.drafted + 1) - self.drafted - 1
        masked = {
            int(begins[row]) + j: mask
            for row, masks_ in masks.of.items()
            for j, mask in enumerate(masks_[: self.drafted[row] + 1])
        }
        ids = sampler.sample(at, wishes, masked)
        refused = np.where(self._are_drafts(oracle, at, offsets, ids), MOST, offsets)
        self.counts[:] = np.minimum.reduceat(refused, begins) + 1
        holds = offsets < self.counts[owners]
        self.token_ids[self.begins[owners[holds]] + offsets[holds]] = ids[holds]

    def _are_drafts(self, oracle: Oracle, at: Places, offsets: I32, ids: I32) -> NDArray[np.bool_]:
        """bool[places]: where the row goes on with what was sampled."""
        goes_on = offsets < self.drafted[at.owners]
        goes_on[goes_on] = oracle.tokens(at.slots[goes_on], at.positions[goes_on]) == ids[goes_on]
        return goes_on

    def copy_out(self, device: Device) -> tuple[CopiedTokens, Event]:
        """The event is that of the last copy."""
        counts, _ = device.copy_out(self.counts)
        drafted, _ = device.copy_out(self.drafted)
        token_ids, last = device.copy_out(self.token_ids)
        return CopiedTokens(self.slots, self._generations, self.room, token_ids, counts, drafted), last
