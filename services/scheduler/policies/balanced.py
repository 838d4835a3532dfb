"""Equal microbatches for pipeline stages: the budget of a step is the estimated demand over the stages (spec 4).

Without it the first step takes all it can, its requests become ready together and stay together, and one huge
microbatch alternates with tiny ones while stages idle.
"""

import numpy as np

from services.scheduler.policies.base import SchedulerView, StepBudget
from services.scheduler.request import Request
from services.scheduler.slots import Rows

MIN_CHUNK = 128
"""Tokens of prefill that a step takes at least, if there are any: smaller ones cost more steps than they balance."""


class BalancedPolicy:
    """Demand counts whether it is in flight or not: else the budget collapses after a large cohort has left."""

    def __init__(self, long_prefill_token_threshold: int = 0) -> None:
        self._threshold = long_prefill_token_threshold

    def begin(self, view: SchedulerView) -> StepBudget:
        most, stages = view.limits.max_num_batched_tokens, view.limits.stages
        chunk = self._threshold or most
        if stages == 1:
            return StepBudget(most, chunk)
        decodes, left = self._running_demand(view)
        prefill = left + self._waiting_demand(view, stages * most - left)
        decodes = -(-decodes // stages)
        prefill = max(-(-prefill // stages), min(prefill, MIN_CHUNK))
        tokens = max(1, min(most, decodes + prefill))
        return StepBudget(tokens, chunk, max(1, decodes), max(1, prefill))

    def order(self, view: SchedulerView) -> Rows:
        """Longest not scheduled first: cohorts take turns, and none starves."""
        if view.limits.stages == 1:
            return view.running
        return view.running[np.argsort(view.slots.last_step.take(view.running), kind="stable")]

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        return hit, count

    @staticmethod
    def _running_demand(view: SchedulerView) -> tuple[int, int]:
        """Decode tokens that the running requests want per round, and prefill tokens that they still lack."""
        s, rows = view.slots, view.running
        going_on = s.tokens.take(rows) + s.placeholders.take(rows) < s.limit.take(rows)
        decoding = s.decoding(rows)
        left = (s.entry.take(rows) - s.computed.take(rows))[~decoding]
        return int((going_on & decoding).sum()), int(left.sum())

    @staticmethod
    def _waiting_demand(view: SchedulerView, enough: int) -> int:
        """Prefill tokens of the requests that could be admitted now; those that could not do not count."""
        total = 0
        for request, hit in view.admissible():
            total += len(request.token_ids) - hit
            if total >= enough:
                break
        return total
