"""The sampler: from hashes to token ids, as the reference sampler makes them, without most logits."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.columns import has_any, indices
from services.worker.backends.sim.model.hashing import U64
from services.worker.backends.sim.model.logits import Logits
from services.worker.backends.sim.model.oracle import Oracle
from services.worker.backends.sim.sampling.parameters import RowParameters, RowRules
from services.worker.batch.slots import I32
from services.worker.sampling.reference import GREEDY_BELOW, adjusted, apply_bitmask, sample_row

NO_POINTS = np.empty(0, np.int32)
NO_MASKS = NO_POINTS.reshape(0, 0)


class SamplingPoints(NamedTuple):
    """The positions at which tokens are sampled; several consecutive ones for a row with drafts."""

    sampled_rows: NDArray[np.int64]
    """Index of each point's row among the sampled rows."""
    slots: I32
    positions: I32
    """Position of the sampled token."""
    hashes: U64
    """Hash of the sequence before it."""


@dataclass(frozen=True)
class SimSampler:
    """The sampler of one epoch. Its methods run on the device. `oracle` has the token history."""

    logits: Logits
    oracle: Oracle

    def sample(
        self,
        points: SamplingPoints,
        parameters: RowParameters,
        masked: I32 = NO_POINTS,
        masks: I32 = NO_MASKS,
        proposed: I32 | None = None,
    ) -> I32:
        """Return int32[points] token ids. Whole logits are computed only where the top token does not decide.

        Args:
            parameters: of the step's sampled rows.
            masked: int32[constrained points], index of each.
            masks: int32[constrained points, words], grammar bitmasks.
            proposed: int32[points, tokens] that precede each point behind the history of its slot; None: no token.
        """
        ids, rules = self.logits.top(points.hashes), parameters.rules
        ruled = {i: rules[row] for i, row in enumerate(points.sampled_rows.tolist()) if row in rules} if rules else {}
        draws = parameters.temperature[points.sampled_rows] >= GREEDY_BELOW
        special = draws.copy()
        special[[*ruled]] = True
        greedy = ~special[masked]
        self._replace_forbidden(ids, points.hashes, masked[greedy], masks[greedy])
        mask_of = dict(zip(masked[~greedy].tolist(), masks[~greedy], strict=True))
        for i in indices(special).tolist():
            mask, position = mask_of.get(i), int(points.positions[i])
            if draws[i] or not _top_remains(int(ids[i]), ruled.get(i), mask, position):
                known = None if proposed is None else proposed[i]
                ids[i] = self._sample_whole_row(points, i, parameters, mask, known)
        return ids

    def _replace_forbidden(self, ids: I32, hashes: U64, at: I32, masks: I32) -> None:
        """Replace the top tokens at the points `at` that `masks`, int32[points, words], forbid by the greatest allowed
        ones."""
        if not len(at):
            return
        tops = ids[at]
        if has_any(forbidden := masks[np.arange(len(at)), tops >> 5] >> (tops & 31) & 1 == 0):
            at = at[forbidden]
            ids[at] = self.logits.greatest(hashes[at], masks[forbidden])

    def _sample_whole_row(
        self, points: SamplingPoints, i: int, parameters: RowParameters, mask: I32 | None, proposed: I32 | None
    ) -> int:
        row, position, c = int(points.sampled_rows[i]), points.positions[i], parameters
        logits = self.logits.rows(points.hashes[i : i + 1])[0]
        if (rules := c.rules.get(row)) is not None:
            tokens = self._tokens_before(int(points.slots[i]), int(position), proposed)
            prompt, output = tokens[: rules.num_prompt], tokens[rules.num_prompt :]
            logits = adjusted(logits, rules.params, prompt, output, mask)
        elif mask is not None:
            apply_bitmask(logits, mask)
        draw = c.temperature[row], c.min_p[row], c.top_k[row], c.top_p[row], c.seed[row], position
        return sample_row(logits, *(value.item() for value in draw))

    def _tokens_before(self, slot: int, position: int, proposed: I32 | None) -> I32:
        """Return int32[position]: the ids before a position, of which the last may be proposed drafts."""
        if proposed is None:
            return self.oracle.tokens(slot, slice(position))
        return np.concatenate((self.oracle.tokens(slot, slice(position - len(proposed))), proposed))


def _top_remains(top: int, rules: RowRules | None, mask: I32 | None, position: int) -> bool:
    """Return True if the row's top token is still the greatest of the tokens that rules and mask allow."""
    if rules is not None and not rules.keep(top, position):
        return False
    return mask is None or bool(mask.item(top // 32) >> top % 32 & 1)
