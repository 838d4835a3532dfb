"""Sampling and verification of one step's rows. A draft is accepted if the target samples the same token there.

Each position of a row is sampled as without drafts, with the same parameters, noise and history. The drafts before the
first one that differs are accepted. The token that differs is the recovered token; the token behind all drafts is the
bonus token. So tokens and log-probabilities are those without drafts, whatever the drafts are (same tokens;
docs/invariants.md).
"""

import numpy as np
from numpy.typing import NDArray

from protocol.columns import indices
from protocol.steps import GrammarOutput
from services.worker.backends.sim.model.oracle import Oracle, spread
from services.worker.backends.sim.sampling.parameters import RowParameters
from services.worker.backends.sim.sampling.sampler import NO_MASKS, NO_POINTS, SamplingPoints, SimSampler
from services.worker.batch.masks import GrammarMask
from services.worker.batch.slots import I32, Rows, SlotTable

_NEVER = np.iinfo(np.int32).max


class DraftAcceptance:
    """The sampled rows of one step, in device memory of this step alone (result memory).

    The host lays them out at launch. Only the device knows how many drafts there are and how many are accepted (no
    hidden sync).

    Attributes:
        room: int32[sampled rows], largest number of tokens of each row.
        firsts: int32[sampled rows], position of the first token that the row samples.
        counts: int32[sampled rows], tokens of the row: accepted drafts and one more; 0: it was left out.
        drafted: int32[sampled rows], drafts that were verified.
        token_ids: int32[sum(counts)], rows back to back.
    """

    def __init__(self, rows: Rows, table: SlotTable) -> None:
        """`rows`: of the plan that `table` has just applied."""
        self._rows, sampled = indices(rows.samples), rows.select(rows.samples)
        self.slots, self.generations, self.room = sampled.slots, sampled.generations, 1 + sampled.drafts
        self.parameters = RowParameters.from_rows(sampled, table)
        self.firsts, self._drafts, self.counts, self.drafted = np.zeros((4, len(self.slots)), np.int32)
        self.token_ids = NO_POINTS

    @property
    def frontiers(self) -> I32:
        """Position of the last token of each row."""
        return self.firsts + self.counts - 1

    def begin(self, firsts: I32, drafts: I32) -> None:
        """Set the rows' true positions and numbers of drafts; int32[rows of the plan] each. Runs on the device."""
        self.firsts[:], self._drafts[:] = firsts[self._rows], drafts[self._rows]

    def run(self, sampler: SimSampler, oracle: Oracle, grammar: GrammarOutput | None, left_out: frozenset[int]) -> None:
        """Sample and verify all rows but those with the slots `left_out` (left-out row). Runs on the device, when the
        positions of all drafts are computed.

        Args:
            grammar: the masks of the constrained rows among them.
        """
        stays = ~np.isin(self.slots, [*left_out]) if left_out else np.ones(len(self.slots), np.bool_)
        if len(kept := indices(stays)):
            self._sample(sampler, oracle, grammar, kept)
            last = self.token_ids[np.cumsum(self.counts[kept]) - 1]
            oracle.settle(self.slots[kept], self.frontiers[kept], last)
        if left_out:
            oracle.leave_out(self.slots[~stays], self.firsts[~stays])

    def _sample(
        self, sampler: SimSampler, oracle: Oracle, grammar: GrammarOutput | None, kept: NDArray[np.intp]
    ) -> None:
        """Set tokens, counts and verified drafts of the sampled rows `kept`."""
        slots, firsts, drafts = self.slots[kept], self.firsts[kept], self._drafts[kept]
        masked, masks, acceptable = NO_POINTS, NO_MASKS, drafts
        if grammar is not None:
            masked, masks, acceptable = GrammarMask.from_message(grammar, slots, drafts, oracle.vocab_size)
        owners, positions = spread(firsts, drafts + 1)
        owner_slots = slots[owners]
        points = SamplingPoints(kept[owners], owner_slots, positions, oracle.chain[owner_slots, positions])
        ids = sampler.sample(points, self.parameters, masked, masks)
        counts = np.ones(len(kept), np.int32)
        if len(ids) > len(kept):  # there are drafts
            offsets = positions - firsts[owners]
            equal = offsets < acceptable[owners]
            equal[equal] = oracle.tokens(owner_slots[equal], positions[equal]) == ids[equal]
            rejected = np.where(equal, _NEVER, offsets)
            counts = np.minimum.reduceat(rejected, indices(offsets == 0)) + 1
            ids = ids[offsets < counts[owners]]
        self.token_ids, self.counts[kept], self.drafted[kept] = ids, counts, acceptable
