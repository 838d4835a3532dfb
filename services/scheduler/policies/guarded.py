"""A policy that fails must not stop the engine (spec 4(e) 5)."""

import logging

from services.scheduler.policies.base import BatchingPolicy, SchedulerView, StepBudget
from services.scheduler.request import Request
from services.scheduler.slots import Rows

log = logging.getLogger("runahead.scheduler")


class GuardedPolicy:
    """Another policy, whose exceptions and senseless budgets are replaced by the least that makes progress."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self._policy = policy
        self._reported: set[str] = set()

    def begin(self, view: SchedulerView) -> StepBudget:
        most = view.limits.max_num_batched_tokens
        try:
            budget = self._policy.begin(view)
        except Exception as error:
            self._report("begin", error)
            return StepBudget(1, 1)
        if 1 <= budget.tokens <= most and budget.chunk >= 1:  # S4-5
            return budget
        self._report(
            "begin", f"a budget of {budget.tokens} tokens in chunks of {budget.chunk}, of {most} allowed"
        )
        return StepBudget(1, 1)

    def order(self, view: SchedulerView) -> Rows:
        try:
            return self._policy.order(view)
        except Exception as error:
            self._report("order", error)
            return view.running

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        try:
            taken, counted = self._policy.admit(view, request, hit, count)
        except Exception as error:
            self._report("admit", error)
            return hit, count
        if 0 <= taken <= hit and taken % view.limits.block_size == 0 and counted >= 0:
            return taken, counted
        self._report("admit", f"{taken} of {hit} cached tokens and {counted} more")
        return hit, count

    def _report(self, question: str, problem: object) -> None:
        """Once for each question: steps are many."""
        if question not in self._reported:
            self._reported.add(question)
            log.error(
                "the batching policy failed in %s, a minimal step is formed instead: %s", question, problem
            )
