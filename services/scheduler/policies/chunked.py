"""The default policy: prefill chunks and decodes share a step, greedily."""

from functools import cache
from typing import Self

import numpy as np

from protocol.columns import has_all
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies.base import SchedulerView, StepBudget


class ChunkedPolicy:
    """Requests take from the budget in turn. `long_prefill_token_threshold`: largest chunk, 0: no limit."""

    def __init__(self, long_prefill_token_threshold: int = 0) -> None:
        self._threshold = long_prefill_token_threshold

    @classmethod
    def from_config(cls, config: SchedulerConfig, limits: Limits) -> Self:
        return cls(config.long_prefill_token_threshold)

    def begin(self, view: SchedulerView) -> StepBudget:
        return _budget(view.limits.max_num_batched_tokens, self._threshold)

    def order(self, view: SchedulerView) -> SlotIds:
        """The slot that was not scheduled for the longest time comes first, so that all take turns."""
        if view.ledger.newest is not None and view.ledger.newest.slots is view.running:
            return view.running  # the last step had them all
        rows, last = view.running, view.slots.last_step[view.running]
        return rows if has_all(last[:-1] <= last[1:]) else rows[np.argsort(last, kind="stable")]

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        return hit, count


@cache
def _budget(most: int, threshold: int) -> StepBudget:
    return StepBudget(most, threshold or most)
