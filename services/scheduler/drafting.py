"""How many drafts to propose: always the same number, or what has paid lately."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.config import SpeculativeConfig
from services.scheduler.ledger import InflightStep
from services.scheduler.slots import Column

_MEMORY = 0.98
"""What a step's figures are worth one step later: about the last fifty count."""
_PROBE_AFTER = (32, 1024)
"""Steps after which drafts that do not pay are tried once more: at first, and at most after trying in vain."""
_VARY_EVERY = 12
"""Steps after which one proposes a draft less, to see what it costs."""
_OUTLIER = 2.0
"""A step that takes so many times what was expected was held up by something else, and counts as no more."""
_HOPE = 0.7
"""Acceptance at the first position until it was measured."""
_MARGIN = 1.02
"""Drafts must promise so much more than none: an estimate is noisy, and no draft costs nothing."""


class Drafting(Protocol):
    def length(self, num_rows: int) -> int:
        """Drafts to propose in the step that is formed, which has `num_rows` rows."""
        ...

    def observe(self, step: InflightStep, drafted: Column, counts: Column, seconds: float) -> None:
        """A step returned.

        Args:
            drafted: int32[rows with samples], verified drafts of each row.
            counts: int32[rows with samples], tokens of each row: accepted drafts and one more.
            seconds: what it took; 0: not known.
        """
        ...


class Fixed:
    """A `Drafting`: as many as configured."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def length(self, num_rows: int) -> int:
        return self._num_drafts

    def observe(self, step: InflightStep, drafted: Column, counts: Column, seconds: float) -> None:
        """Nothing it sees changes it."""


class Adaptive:
    """A `Drafting`: the number that yields the most tokens per second, by what was measured lately.

    What a step yields with k drafts is 1 + sum(P(at least j accepted), j = 1..k) for each row. What it takes is taken
    to be linear, `a + b * computed tokens + c * proposed drafts`, fitted by least squares with forgetting.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows = np.zeros(most)
        """Rows that a draft at this position was planned for; here and below, of recent steps."""
        self._drafted = np.zeros(most)
        """Rows that had one."""
        self._reached = np.zeros(most)
        """Rows that accepted every draft before this position."""
        self._accepted = np.zeros(most)
        """Rows that accepted this one too."""
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._since_change, self._patience = 0, _PROBE_AFTER[0]

    def length(self, num_rows: int) -> int:
        best = self._best(num_rows)
        self._since_change += 1
        if best:
            self._patience = _PROBE_AFTER[0]
        if self._since_change < (_VARY_EVERY if best else self._patience):
            return best
        self._since_change = 0
        if best:
            return best - 1
        self._patience = min(2 * self._patience, _PROBE_AFTER[1])
        return 1

    def _best(self, num_rows: int) -> int:
        cost = self._cost()
        if cost is None:
            return self._most
        base, per_token, per_draft = cost
        tokens = np.concatenate(([1.0], self._acceptance())).cumsum()
        computed = np.concatenate(([1.0], (self._drafted + 1) / (self._rows + 1))).cumsum()
        rate = tokens / (base + per_token * num_rows * computed + per_draft * np.arange(self._most + 1))
        rate[0] *= _MARGIN
        return int(rate.argmax())

    def _acceptance(self) -> list[float]:
        """P(at least j accepted), j = 1 .. most. A position of which little is known is like the one before it."""
        chances, all_so_far, here = [], 1.0, _HOPE
        for accepted, reached in zip(self._accepted.tolist(), self._reached.tolist(), strict=True):
            here = (accepted + here) / (reached + 1)
            all_so_far *= here
            chances.append(all_so_far)
        return chances

    def _cost(self) -> NDArray[np.float64] | None:
        """What a step takes as such, per token and per proposed draft, in seconds; None until that is known."""
        if self._normal[0, 0] < 4:
            return None
        # What the steps so far cannot tell apart is the step's own: drafts cost nothing until they were seen to.
        ridge = np.diag(self._normal.diagonal() * (1e-6, 1e-3, 1e-3)) + 1e-9 * np.eye(3)
        solved = np.linalg.solve(self._normal + ridge, self._moment)
        return np.array(np.maximum(solved, (1e-6, 0, 0)), np.float64)

    def observe(self, step: InflightStep, drafted: Column, counts: Column, seconds: float) -> None:
        planned = step.drafts[step.samples]
        if seconds > 0 and (step.counts - step.drafts == 1).all():  # a prefill would tell of other things
            x = np.array((1.0, len(step.slots) + drafted.sum(), step.proposes))
            if (cost := self._cost()) is not None:
                seconds = min(seconds, _OUTLIER * float(x @ cost))
            self._normal = _MEMORY * self._normal + np.outer(x, x)
            self._moment = _MEMORY * self._moment + x * seconds
        positions = np.arange(1, self._most + 1)
        had_room = planned[:, None] >= positions
        for sums, happened in (
            (self._rows, had_room),
            (self._drafted, had_room & (drafted[:, None] >= positions)),
            (self._reached, had_room & (counts[:, None] >= positions)),
            (self._accepted, had_room & (counts[:, None] > positions)),
        ):
            sums *= _MEMORY
            sums += happened.sum(axis=0)


def drafting(config: SpeculativeConfig | None) -> Drafting | None:
    """None without speculation."""
    if config is None:
        return None
    most = config.num_speculative_tokens
    return Adaptive(most) if config.adaptive else Fixed(most)
