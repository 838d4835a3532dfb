"""How many drafts to propose: always the same number, or what has paid lately."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.config import SpeculativeConfig
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.slots import Column

_MEMORY = 0.98
"""What a step's figures are worth one step later: about the last fifty count."""
_PROBE_AFTER = (32, 1024)
"""Steps after which drafts that do not pay are tried once more: at first, and at most after trying in vain."""
_LOOK_EVERY = 4
"""Steps after which it thinks again."""
_ENOUGH = 4
"""Steps that the first estimate of what they cost needs."""
_VARY_EVERY = 12
"""Steps after which one proposes a draft less, to see what it costs."""
_OUTLIER = 2.0
"""A step that takes so many times what was expected was held up by something else, and counts as no more."""
_LEAST_CHANCE = (0.1, 0.5)
"""What a draft must have until that was measured, and what may be asked of it at most: a draft that is not verified
teaches nothing."""
_REMEMBERED = 1.0
"""Rows whose drafts are not forgotten while there are no others: what failed then is expected to fail still."""
_HOPE = 0.7
"""Acceptance at the first position until it was measured."""
_MARGIN = 1.02
"""Drafts must promise so much more than none: an estimate is noisy, and no draft costs nothing."""


class Drafting(Protocol):
    least_chance: float
    """From where a draft of the step that is formed is not worth verifying."""

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

    least_chance = 0.0

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
        self._positions = np.arange(1, most + 1)
        self._rows = np.zeros((4, most))
        """Of recent steps, by position: rows that a draft was planned for there, that had one, that accepted every
        draft before, and that accepted this one too."""
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._cost: NDArray[np.float64] | None = None
        """What a step takes as such, per token and per proposed draft, in seconds; None until that is known."""
        self._best, self._num_rows = most, 0
        """What was best when last looked at, for so many rows."""
        self.least_chance = _LEAST_CHANCE[0]
        self._steps = self._since_change = 0
        self._patience = _PROBE_AFTER[0]

    def length(self, num_rows: int) -> int:
        if self._steps % _LOOK_EVERY == 0 or num_rows != self._num_rows:
            self._best, self._num_rows = self._best_for(num_rows), num_rows
        best = self._best
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

    def _best_for(self, num_rows: int) -> int:
        if self._cost is None:
            return self._most
        base, per_token, per_draft = self._cost.tolist()
        planned, had = self._rows[:2].tolist()
        tokens = computed = 1.0
        best, best_rate = 0, _MARGIN / (base + per_token * num_rows)
        for position, chance in enumerate(self._acceptance()):
            tokens += chance
            computed += (had[position] + 1) / (planned[position] + 1)
            rate = tokens / (base + per_token * num_rows * computed + per_draft * (position + 1))
            if rate > best_rate:
                best, best_rate = position + 1, rate
        # A draft must bring more than what its row takes would bring otherwise.
        self.least_chance = min(per_token * num_rows * best_rate, _LEAST_CHANCE[1])
        return best

    def _acceptance(self) -> list[float]:
        """P(at least j accepted), j = 1 .. most. A position of which little is known is like the one before it."""
        chances, all_so_far, here = [], 1.0, _HOPE
        for reached, accepted in self._rows[2:].T.tolist():
            here = (accepted + here) / (reached + 1)
            all_so_far *= here
            chances.append(all_so_far)
        return chances

    def observe(self, step: InflightStep, drafted: Column, counts: Column, seconds: float) -> None:
        self._steps += 1
        if seconds > 0 and (step.counts - step.drafts == 1).all():  # a prefill would tell of other things
            self._learn_cost(np.array((1.0, len(step.slots) + drafted.sum(), step.proposes)), seconds)
        planned = step.drafts[step.samples][:, None]
        self._rows *= np.where(
            (self._rows[2] > _REMEMBERED) | (planned >= self._positions).any(0), _MEMORY, 1
        )
        if planned.any():
            at, drafted, counts = self._positions, drafted[:, None], counts[:, None]
            had_room = planned >= at
            happened = (
                had_room,
                had_room & (drafted >= at),
                had_room & (counts >= at),
                had_room & (counts > at),
            )
            self._rows += [rows.sum(axis=0) for rows in happened]

    def _learn_cost(self, x: NDArray[np.float64], seconds: float) -> None:
        if self._cost is not None:
            seconds = min(seconds, _OUTLIER * float(x @ self._cost))
        self._normal = _MEMORY * self._normal + x[:, None] * x
        self._moment = _MEMORY * self._moment + x * seconds
        if self._normal[0, 0] > _ENOUGH and self._steps % _LOOK_EVERY == 0:
            # What the steps so far cannot tell apart is the step's own: drafts cost nothing until they were seen to.
            ridge = np.diag(self._normal.diagonal() * (1e-6, 1e-3, 1e-3)) + 1e-9 * np.eye(3)
            solved = np.linalg.solve(self._normal + ridge, self._moment)
            self._cost = np.array(np.maximum(solved, (1e-6, 0, 0)), np.float64)


def drafting(config: SpeculativeConfig | None) -> Drafting | None:
    """None without speculation."""
    if config is None:
        return None
    most = config.num_speculative_tokens
    return Adaptive(most) if config.adaptive else Fixed(most)
