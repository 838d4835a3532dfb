"""The number of drafts that a step proposes: fixed, or the one that yields the most tokens per second.

What is unknown is measured, and what it costs to measure it is limited: a *trial* proposes another number for a few
steps, and trials together may lose one per cent of the time. Everything follows from results: the tokens of the rows
and the worker's clock. So a replay decides the same.
"""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from protocol.columns import greatest, has_any, total
from services.config import SpeculativeConfig
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.slots import Column

_MEMORY = {"text": 0.2, "machine": 0.5}
"""Seconds after which acceptance and times of a step count for a third; at least `_LEAST` steps."""
_LEAST = 50
_LOOK_EVERY = 4
"""Steps between two estimates of the best number."""
_FIT_EVERY = 4
"""Steps between two fits of their times."""
_OUTLIER = 2.0
"""A step that takes more than this multiple of the expected time was delayed by something else; the excess is cut."""
_MIN_ACCEPTANCE = (0.1, 0.5)
"""`min_acceptance` until costs are known, and its maximum: drafts that are not verified teach nothing."""
_REMEMBERED = 1.0
"""Rows of a position below which its figures do not decay while no drafts are proposed: a failure stays known."""
_PRIOR_ACCEPTANCE = 0.7
"""Acceptance at the first position until it was measured."""
_MARGIN = 1.01
"""Drafts must promise this multiple of the rate without drafts: estimates are noisy, and no draft costs nothing."""
_TRIALS = 0.01
"""Share of the time that trials may lose."""
_TRIAL_STEPS = 5
"""Steps of a trial that propose its number. The first of them still verifies the number before."""
_SETTLING = 8
"""Steps of a rest before the measured ones of a trial without drafts, for drafters with a state of their own: the
first ones wait for the work of steps with drafts."""
_REST = 40
"""Steps from the beginning of a trial to the next one."""
_LEAD = 16
"""Steps after a rest, or after a trial without drafts, in which a drafter with a state of its own gets its input
again."""
_RESTS = 64
"""Most steps of a rest."""
LEARNS = 3
"""Steps out of `_RESTS` that are measured in a rest; one follows another, as the time between two counts."""
_SHORT = 0.004
"""Seconds of a step below which the cost of measuring each one counts."""
_CORRECTIONS = (2, 64)
"""Steps that the fitted time counts for beside those that were measured, and the number of these that count."""
_EXACT_LOADS = 8
"""Numbers of rows that are a load of their own; more rows share one within 19 %."""
_RIDGE = (1e-6, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3)
_LEAST_SECONDS = (1e-6, 0, 0, 0, 0, 0)


class FixedDrafting:
    """Always proposes the same number."""

    min_acceptance = 0.0
    """Acceptance probability below which a draft of the step that is formed is not worth verifying."""
    is_trial = False
    """The step that is formed belongs to a trial."""
    rests = False
    """Speculation rests in the step that is formed: it proposes no drafts, and the drafter gets nothing of it."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def length(self, num_rows: int) -> int:
        """Return the number of drafts per row that a step of `num_rows` rows proposes."""
        return self._num_drafts

    def observe(self, step: InflightStep, drafted: Column, counts: Column, sampled: float) -> None:
        """Learn from a step that returned; ignored here.

        Args:
            drafted: int32[sampling rows], verified drafts of each row.
            counts: int32[sampling rows], tokens of each row: accepted drafts and one more.
            sampled: when it was sampled, seconds on the worker's clock; 0: unknown.
        """


class Acceptance:
    """Acceptance of drafts by position in their row."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._rows = np.zeros((4, most))
        """Decayed counts of rows by draft position: a draft was planned; there was one; every draft before it was
        accepted; it was accepted too."""
        self._age = 0.0
        """Age of these counts in units of the memory: they decay with the next step that had drafts."""
        self._offsets = np.arange(4)[:, None] * (most + 1)

    def pass_time(self, seconds: float, steps: int) -> None:
        self._age += _age(seconds, steps, _MEMORY["text"])

    def add(self, planned: Column, drafted: Column, counts: Column) -> None:
        """Count a step: int32[sampling rows], planned and verified drafts and tokens of each row."""
        if not has_any(planned):
            return
        reached = np.minimum(counts, planned)
        numbers = np.stack((planned, drafted, reached, np.maximum(counts - 1, 0))) + self._offsets
        rows = np.bincount(numbers.ravel(), minlength=4 * (self._most + 1)).reshape(4, -1)
        kept = np.minimum(_REMEMBERED / np.maximum(self._rows[2], _REMEMBERED), 1)
        self._rows *= np.maximum(kept, math.exp(-self._age))
        self._rows += rows[:, :0:-1].cumsum(1)[:, ::-1]
        self._age = 0.0

    def per_row(self) -> tuple[list[float], list[float]]:
        """Return the tokens that a row with k drafts yields, and those that it computes, by k from 0 on.

        A position with few figures takes those of the position before.
        """
        chance, here, yields, computes = 1.0, _PRIOR_ACCEPTANCE, [1.0], [1.0]
        for planned, had, reached, accepted in self._rows.T.tolist():
            here = (accepted + here) / (reached + 1)
            chance *= here
            yields.append(yields[-1] + chance)
            computes.append(computes[-1] + (had + 1) / (planned + 1))
        return yields, computes


class StepSeconds:
    """Time of a step by its number of rows and of proposed drafts.

    A linear function of decode tokens, proposed drafts and prompt tokens is fitted to all steps, by least squares with
    exponential decay. It is corrected by what steps of the same load and number took, relative to the fit at that time:
    times are no linear functions, and a change of the machine's speed concerns all numbers alike.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._normal = np.zeros((len(_RIDGE), len(_RIDGE)))
        self._moment = np.zeros(len(_RIDGE))
        self._fit: list[float] = []
        """Seconds per step, decode token, proposed draft, row with a proposed draft, prompt token, and a drafter's
        input; [] until known."""
        self._new: list[tuple[float, ...]] = []
        """Steps since the last fit: the features, and the seconds."""
        self._age = 0.0
        """Time since the last fit in units of the memory."""
        self._corrections: dict[int, list[list[float]]] = {}
        """By load and number of drafts, and at last for rests: factor, and number of steps."""

    @property
    def known(self) -> bool:
        return bool(self._fit)

    @property
    def per_token(self) -> float:
        return self._fit[1]

    def expected(self, num_rows: int, computes: list[float]) -> list[float]:
        """Return the seconds of a step without prompts by the number of drafts, from 0 on. They must be known.

        Args:
            computes: tokens that a row computes, by the same number.
        """
        base, token, draft, row, _, reads = self._fit
        each, per_token = draft + num_rows * row, num_rows * token
        *corrections, rest = self._of_load(num_rows)
        drafting = enumerate(zip(corrections, computes, strict=True))
        seconds = [(base + reads + per_token * tokens + each * k) * factor for k, ((factor, _), tokens) in drafting]
        return [(base + per_token) * rest[0], *seconds[1:]]

    def rest_measured(self, num_rows: int) -> bool:
        """Return whether a rest was measured at this load."""
        return self._of_load(num_rows)[-1][1] > 0

    @property
    def of_input(self) -> float:
        """Seconds that its input costs a drafter with a state of its own."""
        return self._fit[5]

    def pass_time(self, seconds: float, steps: int) -> None:
        self._age += _age(seconds, steps, _MEMORY["machine"])

    def observe(
        self, num_rows: int, drafted: int, proposes: int, reads: bool, prompt_tokens: int, seconds: float, learns: bool
    ) -> float:
        """Return the seconds of a step without those of another delay, and learn from it if it `learns`.

        Args:
            drafted: verified drafts.
            reads: a drafter with a state of its own got its input.
            prompt_tokens: positions beyond one of each row and its drafts.
            learns: it verifies the number that it proposes.
        """
        tokens, offered = float(num_rows + drafted), float(num_rows * proposes)
        features = (1.0, tokens, float(proposes), offered, float(prompt_tokens), float(reads))
        if self._fit:
            fitted = sum(value * unit for value, unit in zip(features, self._fit, strict=True))
            correction = self._of_load(num_rows)[proposes if reads or proposes else -1]
            seconds = min(seconds, _OUTLIER * correction[0] * fitted)
            if learns and not prompt_tokens:
                correction[1] = min(correction[1] + 1, _CORRECTIONS[1])
                correction[0] += (seconds / fitted - correction[0]) / (correction[1] + _CORRECTIONS[0])
        if learns:
            self._new.append((*features, seconds))
        if len(self._new) >= _FIT_EVERY:
            self._update_fit()
        return seconds

    def _update_fit(self) -> None:
        new, decay = np.array(self._new), math.exp(-self._age)
        x = new[:, :-1]
        self._normal = decay * self._normal + x.T @ x
        self._moment = decay * self._moment + x.T @ new[:, -1]
        self._new, self._age = [], 0.0
        # Ridge: what the steps cannot tell apart stays as it was. At first it is the step's own time.
        ridge = self._normal.diagonal() * _RIDGE + 1e-9
        moment = self._moment + ridge * np.array(self._fit or _LEAST_SECONDS)
        solved = np.linalg.solve(self._normal + np.diag(ridge), moment)
        self._fit = np.maximum(solved, _LEAST_SECONDS).tolist()

    def _of_load(self, num_rows: int) -> list[list[float]]:
        load = num_rows
        if num_rows > _EXACT_LOADS:
            load = _EXACT_LOADS + math.ceil(4 * math.log2(num_rows / _EXACT_LOADS))
        if load not in self._corrections:
            self._corrections[load] = [[1.0, 0.0] for _ in range(self._most + 2)]
        return self._corrections[load]


class PlannedStep(NamedTuple):
    """A step of a trial, or one that prepares it or follows it."""

    proposes: int | None
    """None: the best number."""
    is_trial: bool = False
    rests: bool = False


class AdaptiveDrafting:
    """Proposes the number with the highest estimated rate of tokens.

    While that is none, speculation *rests* until the next estimate: a step then costs what it costs without
    speculation.
    """

    def __init__(self, most: int, lead: int = 0) -> None:
        """`lead`: steps after a rest in which the drafter gets its input again."""
        self._most, self._lead = most, lead
        self._acceptance = Acceptance(most)
        self._seconds = StepSeconds(most)
        self._best, self._num_rows = most, 0
        """The latest estimate, and the number of rows it is for."""
        self._rate = 0.0
        """Tokens per second of the best number; 0: unknown."""
        self._losses: list[float] = []
        """Seconds that a step is expected to lose, by its number of drafts."""
        self.min_acceptance = _MIN_ACCEPTANCE[0]
        self.is_trial = self.rests = False
        self._credit = 0.0
        """Seconds that trials may lose now."""
        self._planned: deque[PlannedStep] = deque()
        """Steps of the present trial that are not formed yet."""
        self._next_trial = self._turn = 0
        self._formed = self._proposed = 0
        """Steps formed so far, and the number of drafts that the last one proposes."""
        self._rest_until = 0
        """Number of formed steps at which the present rest ends."""
        self._rested, self._seconds_plain = 0, 0.0
        """Steps of rests without credit so far, and the expected seconds of one."""
        self._last = (0, 0.0)
        """Id of the last step that returned and was measured, and when it was sampled."""

    def length(self, num_rows: int) -> int:
        if self._formed < self._rest_until and num_rows == self._num_rows:
            self._formed += 1
            self._rested += 1
            return 0
        if self.rests or self._formed % _LOOK_EVERY == 0 or num_rows != self._num_rows:
            self._look(num_rows)
        if not self._planned:
            self._begin_trial()
        self._formed += 1
        planned = self._planned.popleft() if self._planned else None
        number, self.is_trial, self.rests = planned or PlannedStep(None)
        if number is None:
            number = self._best
        self._rest_until = 0
        if not (planned or number or self._proposed) and self._rate > 0:
            self.rests = True
            self._rest_until = self._formed + min(_RESTS, int(_MEMORY["machine"] / self._seconds_plain))
            self._rested += 1
        self._proposed = number
        return number

    def _look(self, num_rows: int) -> None:
        """Estimate the best number."""
        self._num_rows = num_rows
        self._credit += _TRIALS * self._rested * self._seconds_plain
        self._rested = 0
        if not self._seconds.known:
            return
        yields, computes = self._acceptance.per_row()
        seconds = self._seconds.expected(num_rows, computes)
        rates = [num_rows * tokens / time for tokens, time in zip(yields, seconds, strict=True)]
        best = max(range(self._most + 1), key=rates.__getitem__)
        self._best = best if rates[best] > _MARGIN * rates[0] else 0
        self._rate, self._seconds_plain = rates[self._best], seconds[0]
        self._losses = [time - num_rows * tokens / self._rate for tokens, time in zip(yields, seconds, strict=True)]
        # A draft must yield more than its share of the step's time yields otherwise.
        self.min_acceptance = min(self._seconds.per_token * self._rate, _MIN_ACCEPTANCE[1])

    def _begin_trial(self) -> None:
        """Begin the next trial once its expected loss is covered: of no drafts, of the best other number, and of the
        neighbours of the best one."""
        if self._formed < self._next_trial or not self._rate:
            return
        best, losses = self._best, self._losses
        others = (number for number in range(self._most + 1) if number != best)
        turns = (0, min(others, key=losses.__getitem__), best - 1, best + 1)
        while (number := turns[self._turn % 4]) == best or not 0 <= number <= self._most:
            self._turn += 1
        is_first = number == 0 and not self._seconds.rest_measured(self._num_rows)
        lead = self._lead if self.rests or number == 0 else 0
        settling = _SETTLING if lead and number == 0 else 0
        lead_cost = lead * self._seconds.of_input + (lead + settling) * max(losses[0], 0.0)
        if not is_first and self._credit <= _TRIAL_STEPS * losses[number] + lead_cost:
            return
        self._turn += 1
        self._next_trial = self._formed + lead + _REST
        if not is_first:
            self._credit -= lead_cost
        inputs, trial = [PlannedStep(0)] * lead, PlannedStep(number, is_trial=True)
        steps = [*inputs, *[trial] * _TRIAL_STEPS]
        if number == 0:
            settles = [PlannedStep(0, rests=True)] * settling
            steps = [trial, *settles, *[trial._replace(rests=True)] * (_TRIAL_STEPS - 1), *inputs]
        # The last one verifies the drafts of the one before
        self._planned += [*steps, PlannedStep(None, is_trial=True)]

    def observe(self, step: InflightStep, drafted: Column, counts: Column, sampled: float) -> None:
        if step.rests and not step.is_trial and self._seconds_plain < _SHORT and step.step_id % _RESTS >= LEARNS:
            return
        (before, since), self._last = self._last, (step.step_id, sampled)
        seconds, steps = max(sampled - since, 0.0) if since and sampled else 0.0, step.step_id - before
        if steps > 0:
            self._acceptance.pass_time(seconds, steps)
            self._seconds.pass_time(seconds, steps)
        planned = step.drafts if len(step.drafts) == len(counts) else step.drafts[step.samples]
        self._acceptance.add(planned, drafted, counts)
        if not seconds or steps != 1:
            return
        num_rows, most = len(step.slots), greatest(planned, 0)
        prompt_tokens = step.num_tokens - num_rows - (total(planned) if most else 0)
        num_drafted, reads = total(drafted) if most else 0, self._lead > 0 and not step.rests
        learns = most == step.proposes  # others verify and propose different numbers
        seconds = self._seconds.observe(num_rows, num_drafted, step.proposes, reads, prompt_tokens, seconds, learns)
        if not prompt_tokens and (step.is_trial or not step.rests):
            self._credit += _TRIALS * seconds
            if step.is_trial and self._rate:
                self._credit -= seconds - total(counts) / self._rate


def _age(seconds: float, steps: int, memory: float) -> float:
    return min(seconds / memory, steps / _LEAST)


Drafting = FixedDrafting | AdaptiveDrafting
NO_DRAFTING = FixedDrafting(0)


def drafting_from_config(config: SpeculativeConfig | None) -> Drafting:
    if config is None:
        return NO_DRAFTING
    most, lead = config.num_speculative_tokens, 0 if config.method == "ngram" else _LEAD
    return AdaptiveDrafting(most, lead) if config.adaptive else FixedDrafting(most)
