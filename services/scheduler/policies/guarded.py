"""A policy that fails must not stop the engine (spec 4(e) 5)."""

import logging

import numpy as np

from services.scheduler.core.request import Request
from services.scheduler.core.slots import LIVE, SlotIds
from services.scheduler.policies.base import BatchingPolicy, SchedulerView, StepBudget

log = logging.getLogger("runahead.scheduler")

LEAST = StepBudget(1, 1)
"""One token of whatever comes first: progress for certain, and within every limit."""


class GuardedPolicy:
    """Another policy, whose exceptions and senseless answers are replaced by the least that makes progress."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self._policy = policy
        self._reported: set[tuple[str, str]] = set()

    def begin(self, view: SchedulerView) -> StepBudget:
        """A budget within S4-5: a step may hold a token at least and what the workers take at most."""
        try:
            budget = self._policy.begin(view)
            most, caps = view.limits.max_num_batched_tokens, (budget.decodes, budget.prefill)
            sensible = 1 <= budget.tokens <= most and budget.chunk >= 1
            sensible &= all(cap is None or cap >= 0 for cap in (*caps, budget.admissions)) and caps != (0, 0)
        except Exception as error:
            self._report("begin", error)
            return LEAST
        if not sensible:
            self._report("begin", f"{budget}, {most} tokens allowed")
            return LEAST
        return budget

    def order(self, view: SchedulerView) -> SlotIds:
        """Running slots, each at most once."""
        try:
            rows = self._policy.order(view)
            sensible = rows is view.running or _some_of(rows, view)
        except Exception as error:
            self._report("order", error)
            return view.running
        if not sensible:
            self._report("order", f"{rows}, of {view.running}")
            return view.running
        return rows

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        """What was offered, where the policy's answer is not a part of it."""
        try:
            taken, counted = self._policy.admit(view, request, hit, count)
            sensible = 0 <= taken <= hit and taken % view.limits.block_size == 0
            sensible &= 0 <= counted <= count + hit - taken
        except Exception as error:
            self._report("admit", error)
            return hit, count
        if not sensible:
            self._report("admit", f"{taken} of {hit} cached tokens and {counted} of {count} more")
            return hit, count
        return taken, counted

    def _report(self, question: str, problem: object) -> None:
        """Once of a kind: steps are many."""
        kind = (question, type(problem).__name__)
        if kind not in self._reported:
            self._reported.add(kind)
            log.error(
                "the batching policy failed in %s, the least that makes progress is done instead: %s",
                question,
                problem,
                exc_info=problem if isinstance(problem, Exception) else None,
            )


def _some_of(rows: SlotIds, view: SchedulerView) -> bool:
    live = view.slots.state.take(rows) == LIVE
    return bool(live.all()) and (len(rows) < 2 or int(np.bincount(rows).max()) == 1)
