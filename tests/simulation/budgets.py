"""Check that each step keeps to the answers of its policy."""

from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotColumns, SlotIds
from services.scheduler.policies import BatchingPolicy, SchedulerView, StepBudget
from tests.simulation.invariants import demand


class WatchedPolicy:
    """A policy that delegates to another one and records its answers."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self.policy = policy
        self._budget = StepBudget(0, 0)
        self._whole_prompts = False
        self.shown: list[int] = []
        """Slots in the policy's last order."""
        self._first: dict[Request, tuple[int, int]] = {}
        """Request -> first slice that the policy allowed: (start, count)."""

    def begin(self, view: SchedulerView) -> StepBudget:
        self._first.clear()
        self._budget, self._whole_prompts = self.policy.begin(view), view.limits.whole_prompts
        demand(1 <= self._budget.tokens <= view.limits.max_num_batched_tokens, "budget range", self._budget)
        return self._budget

    def order(self, view: SchedulerView) -> SlotIds:
        rows = self.policy.order(view)
        self.shown = rows.tolist()
        return rows

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        answer = self._first[request] = self.policy.admit(view, request, hit, count)
        return answer

    def check(self, step: InflightStep, slots: SlotColumns, entering: set[int]) -> None:
        """Check the step against the budget, row by row and as a whole."""
        budget, sums = self._budget, {"decodes": 0, "prefill": 0, "tokens": 0}
        for slot, start, count in zip(*(c.tolist() for c in (step.slots, step.starts, step.counts)), strict=True):
            if slot in entering:
                request = slots.request(slot)
                first = self._first[request]
                is_first = (start, count) == first
                is_cut = bool(request.items) and start == first[0] and count < first[1]  # encoder budget
                demand(is_first or is_cut, "policy", "first slice of slot {}", slot)
            else:
                demand(slot in self.shown, "policy", "slot {} was left out of the order", slot)
            allowed = count <= budget.chunk or self._whole_prompts
            demand(allowed, "policy", "a chunk of {}, allowed {}", count, budget.chunk)
            is_prefill = start < slots.entry[slot]
            sums["prefill" if is_prefill else "decodes"] += count if is_prefill else 1
            sums["tokens"] += count
        for name, total in sums.items():
            most = getattr(budget, name)
            allowed = most is None or total <= most or self._whole_prompts  # which exceed shares, not the step
            demand(allowed, "budget range", "{}: {}, budget {}", name, total, most)
        most = budget.admissions
        demand(most is None or len(entering) <= most, "policy", "{} admissions, allowed {}", len(entering), most)
