import numpy as np
from numpy.typing import NDArray

from services.scheduler.policies.base import SchedulerView, StepBudget


class ChunkedPolicy:
    """The default: prefill chunks and decodes share a step, greedily, in order of rank."""

    def __init__(self, long_prefill_token_threshold: int = 0) -> None:
        self._threshold = long_prefill_token_threshold

    def begin(self, view: SchedulerView) -> StepBudget:
        return StepBudget(view.max_num_batched_tokens, self._threshold or view.max_num_batched_tokens)

    def order(self, view: SchedulerView) -> NDArray[np.int32]:
        return view.slots
