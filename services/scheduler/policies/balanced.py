"""Equal microbatches for pipeline stages: a budget per step from the estimated demand of one round (spec 4).

A *round* is as many steps as there are stages. Without such a budget the first step takes all it can, its requests
become ready together and stay together, and one huge microbatch alternates with tiny ones while stages idle.

Demand is what a round has to compute, whether it is in flight by now or not: a budget from what is left alone would
shrink from step to step after a large cohort has gone. Nothing is stored; the number of the step is the place in the
round.
"""

import numpy as np

from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies.base import SchedulerView, StepBudget

MIN_CHUNK = 64
"""Tokens of prefill that a step takes at least, if so many wait: the cost of a step hardly depends on fewer."""


class BalancedPolicy:
    """Decodes and prefills have budgets of their own, so that neither pushes the other out of a step."""

    def __init__(self, long_prefill_token_threshold: int = 0) -> None:
        self._threshold = long_prefill_token_threshold

    def begin(self, view: SchedulerView) -> StepBudget:
        most, stages = view.limits.max_num_batched_tokens, view.limits.stages
        chunk = self._threshold or most
        if stages == 1:
            return StepBudget(most, chunk)
        demand, left, under_way = _running(view)
        decodes = max(1, _share(demand, view.next_step, stages))
        left += _waiting(view, stages * most - left)
        even = -(-(left + under_way) // stages) if left else 0
        prefill = min(left, max(even, MIN_CHUNK))
        widest = 1 + int(view.slots.proposed.take(view.running).max(initial=0))
        return StepBudget(min(most, decodes * widest + prefill), chunk, decodes, prefill)

    def order(self, view: SchedulerView) -> SlotIds:
        """Longest not scheduled first, then by rank: cohorts take turns, and none starves."""
        rows = view.running
        if view.limits.stages == 1:
            return rows
        return rows[np.argsort(view.slots.last_step.take(rows), kind="stable")]

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        return hit, count


def _share(demand: int, step: int, stages: int) -> int:
    """One step's part of a round: any `stages` steps in a row get `demand` together, and no two differ by more than
    one."""
    place = step % stages
    return demand * (place + 1) // stages - demand * place // stages


def _running(view: SchedulerView) -> tuple[int, int, int]:
    """Of running requests: rows of decodes that a round wants, tokens of prefill not dispatched yet and in flight."""
    s, rows = view.slots, view.running
    entry, computed = s.entry.take(rows), s.computed.take(rows)
    goes_on = s.tokens.take(rows) + s.sampling.take(rows) < s.limit.take(rows)
    dispatched = np.minimum(computed, entry)
    written = np.minimum(computed - s.inflight.take(rows), entry)
    return (
        int(np.count_nonzero(goes_on & (computed >= entry))),
        int((entry - dispatched).sum()),
        int((dispatched - written).sum()),
    )


def _waiting(view: SchedulerView, enough: int) -> int:
    """Prefill tokens of the waiting requests that could be admitted now; the others would only re-create a front
    load. The walk ends where the budget is as large as it can be."""
    total = 0
    for request, hit in view.admissible():
        if total >= enough:
            break
        total += len(request.token_ids) - hit
    return total
