from services.scheduler.policies.base import SchedulerView, StepBudget
from services.scheduler.slots import Rows


class ChunkedPolicy:
    """The default: prefill chunks and decodes share a step, greedily, in order of rank."""

    def __init__(self, long_prefill_token_threshold: int = 0) -> None:
        self._threshold = long_prefill_token_threshold

    def begin(self, view: SchedulerView) -> StepBudget:
        return StepBudget(view.max_num_batched_tokens, self._threshold or view.max_num_batched_tokens)

    def order(self, view: SchedulerView) -> Rows:
        return view.slots
