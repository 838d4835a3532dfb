"""Sampling and verification of one step's rows. A draft is accepted if the target samples the same token there.

Each position of a row is sampled as without drafts, with the same parameters, noise and history. The drafts before the
first one that differs are accepted. The token that differs is the recovered token; the token behind all drafts is the
bonus token. So tokens and log-probabilities are those without drafts, whatever the drafts are (same tokens;
docs/invariants.md).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.steps import NO_DRAFT
from services.worker.backends.sim.device.simulated import SimDevice, SimEvent
from services.worker.backends.sim.model.oracle import Oracle, spread
from services.worker.backends.sim.sampling.row_rules import RulesByRow
from services.worker.backends.sim.sampling.sampler import SamplingPoints, SimSampler
from services.worker.backends.sim.sampling.step_masks import StepMasks
from services.worker.batch.slots import I32, Rows

_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class CopiedTokens:
    """Tokens of a step's sampled rows on the host; valid once the event of their copies has passed. int32[rows]."""

    slots: I32
    generations: I32
    room: I32
    """Largest number of tokens of each row."""
    token_ids: I32
    """int32[sum(room)]: each row's tokens, then unused room."""
    counts: I32
    """Tokens of each row."""
    drafted: I32
    """Drafts of each row that were verified."""

    def ragged(self) -> I32:
        """Return int32[sum(counts)] tokens, rows back to back."""
        if len(self.token_ids) == len(self.counts) and self.counts.all():
            return self.token_ids
        rows, offsets = spread(np.zeros_like(self.room), self.room)
        return self.token_ids[offsets < self.counts[rows]]


class DraftAcceptance:
    """The sampled rows of one step, in device memory of this step alone (result memory).

    The host lays them out at launch with room for all planned drafts. Only the device knows how many drafts there are
    and how many are accepted (no hidden sync).

    Attributes:
        rows: int64[sampled rows], index of each in the step's rows.
        begins: int64[sampled rows], where each row's tokens begin in `token_ids`.
        firsts: int32[sampled rows], position of the first token that the row samples.
        counts: int32[sampled rows], tokens of the row: accepted drafts and one more; 0: it was left out.
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
        """Position of the last token of each row."""
        return self.firsts + self.counts - 1

    def begin(self, firsts: I32, drafts: I32) -> None:
        """Set the rows' true positions and numbers of drafts; int32[rows of the plan] each. Runs on the device."""
        self.firsts[:], self._drafts[:] = firsts[self.rows], drafts[self.rows]

    def run(self, sampler: SimSampler, oracle: Oracle, rules: RulesByRow, masks: StepMasks) -> None:
        """Sample and verify all rows. Runs on the device, when the positions of all drafts are computed."""
        if len(self.token_ids) == len(self.slots):
            self._sample(sampler, oracle, rules, masks)
        else:
            self._verify(sampler, oracle, rules, masks)
        if len(left_out := masks.left_out):
            self._settle(oracle, np.flatnonzero(self.counts))
            oracle.leave_out(self.slots[left_out], self.firsts[left_out])
        else:
            self._settle(oracle, slice(None))

    def _settle(self, oracle: Oracle, rows: slice | NDArray[np.int64]) -> None:
        last = self.token_ids[(self.begins + self.counts - 1)[rows]]
        oracle.settle(self.slots[rows], self.frontiers[rows], last)

    def _sample(self, sampler: SimSampler, oracle: Oracle, rules: RulesByRow, masks: StepMasks) -> None:
        """Sample one token per row: a faster `_verify` for a step without drafts."""
        self.counts[:] = 1
        self.counts[masks.left_out] = 0
        kept = np.flatnonzero(self.counts)
        slots, firsts = self.slots[kept], self.firsts[kept]
        points = SamplingPoints(kept, self.rows[kept], slots, firsts, oracle.chain[slots, firsts])
        masked = np.searchsorted(kept, masks.rows).astype(np.int32)
        self.token_ids[kept] = sampler.sample(points, rules, masked, masks.masks[masks.firsts])

    def _verify(self, sampler: SimSampler, oracle: Oracle, rules: RulesByRow, masks: StepMasks) -> None:
        self.drafted[:] = masks.acceptable(self._drafts)
        widths = self.drafted + 1
        widths[masks.left_out] = self.drafted[masks.left_out] = 0
        sampled, positions = spread(self.firsts, widths)
        if not len(sampled):
            return
        slots, offsets = self.slots[sampled], positions - self.firsts[sampled]
        points = SamplingPoints(sampled, self.rows[sampled], slots, positions, oracle.chain[slots, positions])
        begins, kept_rows = np.cumsum(widths) - widths, np.flatnonzero(widths)
        used = widths[masks.rows]
        _, masked = spread(begins[masks.rows], used)
        _, at = spread(masks.firsts, used)
        ids = sampler.sample(points, rules, masked, masks.masks[at])
        rejected = np.where(self._equal_drafts(oracle, points, offsets, ids), _NEVER, offsets)
        self.counts[kept_rows] = np.minimum.reduceat(rejected, begins[kept_rows]) + 1
        kept = offsets < self.counts[sampled]
        self.token_ids[self.begins[sampled[kept]] + offsets[kept]] = ids[kept]

    def _equal_drafts(self, oracle: Oracle, points: SamplingPoints, offsets: I32, ids: I32) -> NDArray[np.bool_]:
        """Return bool[points]: True where a draft is at the point and equals the sampled token."""
        equal = offsets < self.drafted[points.sampled_rows]
        equal[equal] = oracle.tokens(points.slots[equal], points.positions[equal]) == ids[equal]
        return equal

    def copy_out(self, device: SimDevice) -> tuple[CopiedTokens, SimEvent]:
        """Enqueue the copies to the host. The event is that of the last copy."""
        counts, _ = device.copy_out(self.counts)
        drafted, _ = device.copy_out(self.drafted)
        token_ids, last = device.copy_out(self.token_ids)
        return CopiedTokens(self.slots, self._generations, self.room, token_ids, counts, drafted), last
