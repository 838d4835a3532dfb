"""The number of drafts that a step proposes: fixed, or the one that yields the most tokens per second."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.config import SpeculativeConfig
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.slots import Column

_DECAY = 0.98
"""Weight of a step's figures after one more step: about the last fifty steps count."""
_PROBE_AFTER = (32, 1024)
"""Steps without drafts before they are tried again: the first time, and at most after unsuccessful attempts."""
_LOOK_EVERY = 4
"""Steps between two estimates of the best number."""
_ENOUGH = 4
"""Steps that the first estimate of the cost needs."""
_VARY_EVERY = 12
"""Steps after which one step proposes a draft less, to measure what a draft costs."""
_OUTLIER = 2.0
"""A step that takes more than this multiple of the expected time was delayed by something else; the excess is cut."""
_MIN_ACCEPTANCE = (0.1, 0.5)
"""`min_acceptance` until costs are known, and its maximum: drafts that are not verified teach nothing."""
_REMEMBERED = 1.0
"""Rows of a position below which its figures do not decay while no drafts are proposed: a failure stays known."""
_PRIOR_ACCEPTANCE = 0.7
"""Acceptance at the first position until it was measured."""
_MARGIN = 1.02
"""Drafts must promise this multiple of the rate without drafts: estimates are noisy, and no draft costs nothing."""


class Drafting(Protocol):
    min_acceptance: float
    """Acceptance probability below which a draft of the step that is formed is not worth verifying."""

    def length(self, num_rows: int) -> int:
        """Return the number of drafts per row that a step of `num_rows` rows proposes."""
        ...

    def observe(self, step: InflightStep, drafted: Column, counts: Column, seconds: float) -> None:
        """Learn from a step that returned.

        Args:
            drafted: int32[sampling rows], verified drafts of each row.
            counts: int32[sampling rows], tokens of each row: accepted drafts and one more.
            seconds: time of the step on the device; 0: unknown.
        """
        ...


class FixedDrafting:
    """A `Drafting` that always proposes the same number."""

    min_acceptance = 0.0

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def length(self, num_rows: int) -> int:
        return self._num_drafts

    def observe(self, step: InflightStep, drafted: Column, counts: Column, seconds: float) -> None:
        """Ignored."""


class AdaptiveDrafting:
    """A `Drafting` that proposes the number with the highest estimated rate of tokens.

    A row of a step with k drafts yields 1 + sum(P(at least j accepted), j = 1..k) tokens. The time of a step is
    modelled as `a + b * computed tokens + c * proposed drafts`, fitted by least squares with exponential decay.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._positions = np.arange(1, most + 1)
        self._rows = np.zeros((4, most))
        """Decayed counts of rows by draft position: a draft was planned; there was one; every draft before it was
        accepted; it was accepted too."""
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._cost: NDArray[np.float64] | None = None
        """Seconds per step, per token and per proposed draft; None until known."""
        self._best, self._num_rows = most, 0
        """The latest estimate, and the number of rows it is for."""
        self.min_acceptance = _MIN_ACCEPTANCE[0]
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
        # A draft must yield more than its share of the step's time yields otherwise.
        self.min_acceptance = min(per_token * num_rows * best_rate, _MIN_ACCEPTANCE[1])
        return best

    def _acceptance(self) -> list[float]:
        """P(at least j accepted), j = 1 .. most. A position with few figures takes those of the position before."""
        chances, all_so_far, here = [], 1.0, _PRIOR_ACCEPTANCE
        for reached, accepted in self._rows[2:].T.tolist():
            here = (accepted + here) / (reached + 1)
            all_so_far *= here
            chances.append(all_so_far)
        return chances

    def observe(self, step: InflightStep, drafted: Column, counts: Column, seconds: float) -> None:
        self._steps += 1
        if seconds > 0 and (step.counts - step.drafts == 1).all():  # a prefill has other costs
            self._learn_cost(np.array((1.0, len(step.slots) + drafted.sum(), step.proposes)), seconds)
        planned = step.drafts[step.samples][:, None]
        self._rows *= np.where((self._rows[2] > _REMEMBERED) | (planned >= self._positions).any(0), _DECAY, 1)
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
        self._normal = _DECAY * self._normal + x[:, None] * x
        self._moment = _DECAY * self._moment + x * seconds
        if self._normal[0, 0] > _ENOUGH and self._steps % _LOOK_EVERY == 0:
            # Ridge: what the steps cannot tell apart counts as the step's own time, so drafts cost nothing at first.
            ridge = np.diag(self._normal.diagonal() * (1e-6, 1e-3, 1e-3)) + 1e-9 * np.eye(3)
            solved = np.linalg.solve(self._normal + ridge, self._moment)
            self._cost = np.array(np.maximum(solved, (1e-6, 0, 0)), np.float64)


def drafting_from_config(config: SpeculativeConfig | None) -> Drafting | None:
    """Return None without speculation."""
    if config is None:
        return None
    most = config.num_speculative_tokens
    return AdaptiveDrafting(most) if config.adaptive else FixedDrafting(most)
