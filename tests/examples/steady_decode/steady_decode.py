"""An example of a batching policy: decodes first, and few prefill tokens in a step in which a request decodes.

A long prompt then delays the tokens of running requests by little, and takes more steps itself.
"""

from typing import Self

import numpy as np

from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies import SchedulerView, StepBudget


class SteadyDecodePolicy:
    """`prefill`: maximum of prefill tokens in a step in which a request decodes."""

    def __init__(self, prefill: int) -> None:
        self._prefill = prefill

    @classmethod
    def from_config(cls, config: SchedulerConfig, limits: Limits) -> Self:
        """The budget of a step is shared equally among prefill and decodes."""
        return cls(max(1, limits.max_num_batched_tokens // 2))

    def begin(self, view: SchedulerView) -> StepBudget:
        most = view.limits.max_num_batched_tokens
        decodes = view.slots.decoding(view.running).any()
        return StepBudget(most, most, prefill=self._prefill if decodes else None)

    def order(self, view: SchedulerView) -> SlotIds:
        """Decodes before prefills, each in their usual order."""
        decoding = view.slots.decoding(view.running)
        return np.concatenate((view.running[decoding], view.running[~decoding]))

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        """The whole offer."""
        return hit, count
