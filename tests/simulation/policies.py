"""A policy without reason, so that nothing in the scheduler leans on the habits of the real ones."""

from random import Random

import numpy as np

from services.scheduler.policies import SchedulerView, StepBudget
from services.scheduler.slots import Rows


class WhimsicalPolicy:
    """Any budget, any chunk, any order, and rows hidden at will; deterministic by its seed."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def begin(self, view: SchedulerView) -> StepBudget:
        tokens = self._rng.randint(1, view.max_num_batched_tokens)
        return StepBudget(tokens, self._rng.randint(1, tokens))

    def order(self, view: SchedulerView) -> Rows:
        slots: list[int] = view.slots.tolist()
        shown = [slot for slot in slots if self._rng.random() < 0.8] or slots[:1]
        self._rng.shuffle(shown)
        return np.array(shown, np.int64)
