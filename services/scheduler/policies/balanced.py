"""Equal microbatches for pipeline stages: a budget per step from the estimated demand of one round.

A *round* has as many steps as there are stages. Without such a budget the first step takes all it can; its requests
become ready together and stay together, and one huge microbatch alternates with tiny ones while stages are idle.

Demand is all work of a round, in flight or not: a budget from the remaining work alone would shrink from step to step
after a large cohort was sent. The policy has no state; the number of the step is the position in the round.
"""

import numpy as np

from services.scheduler.policies.base import SchedulerView, StepBudget
from services.scheduler.policies.chunked import ChunkedPolicy

MIN_CHUNK = 64
"""Minimum of prefill tokens in a step, if that many wait: with fewer, the cost of a step hardly changes."""


class BalancedPolicy(ChunkedPolicy):
    """Decodes and prefills have separate budgets, so that neither displaces the other. With one stage it is the default
    policy (one-stage identity)."""

    def begin(self, view: SchedulerView) -> StepBudget:
        budget = super().begin(view)
        most, chunk, stages = budget.tokens, budget.chunk, view.limits.stages
        if stages == 1:
            return budget
        demand, left, in_flight = _running_demand(view)
        decodes = max(1, _share(demand, view.next_step, stages))
        left += _waiting_demand(view, stages * most - left)
        even = -(-(left + in_flight) // stages) if left else 0
        prefill = min(left, max(even, MIN_CHUNK))
        widest = 1 + int(view.slots.proposed[view.running].max(initial=0))
        return StepBudget(min(most, decodes * widest + prefill), chunk, decodes, prefill)


def _share(demand: int, step: int, stages: int) -> int:
    """Share of one step. Any `stages` consecutive steps get `demand` together; no two differ by more than one."""
    position = step % stages
    return demand * (position + 1) // stages - demand * position // stages


def _running_demand(view: SchedulerView) -> tuple[int, int, int]:
    """Demand of running requests: decode rows of a round, prefill tokens not dispatched, prefill tokens in flight."""
    s, rows = view.slots, view.running
    entry, computed = s.entry[rows], s.computed[rows]
    goes_on = s.tokens[rows] + s.sampling[rows] < s.limit[rows]
    dispatched = np.minimum(computed, entry)
    written = np.minimum(computed - s.inflight[rows], entry)
    return (
        int(np.count_nonzero(goes_on & (computed >= entry))),
        int((entry - dispatched).sum()),
        int((dispatched - written).sum()),
    )


def _waiting_demand(view: SchedulerView, enough: int) -> int:
    """Prefill tokens of waiting requests that could be admitted now; the walk ends at `enough`. Others do not count:
    the first steps would be filled with them."""
    total = 0
    for request, hit in view.admissible():
        if total >= enough:
            break
        total += len(request.token_ids) - hit
    return total
