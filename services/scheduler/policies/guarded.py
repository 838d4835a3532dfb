"""A policy that fails must not stop the engine (policy guard, docs/invariants.md)."""

import logging
from operator import index

import numpy as np

from services.scheduler.core.request import Request
from services.scheduler.core.slots import LIVE, SlotIds
from services.scheduler.policies.base import BatchingPolicy, SchedulerView, StepBudget

log = logging.getLogger("runahead.scheduler")

LEAST = StepBudget(1, 1)
"""One token of the first request: certain progress within every limit."""


class ImpossibleAnswer(Exception):
    """A policy has returned what no step can have."""


class GuardedPolicy:
    """A policy whose exceptions and impossible answers are replaced by the least that makes progress."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self._policy = policy
        self._reported: set[tuple[str, str]] = set()
        self._checked = LEAST, LEAST
        """The budget that the policy returned last and that was possible, and its copy."""

    def begin(self, view: SchedulerView) -> StepBudget:
        """Check the budget range: a step holds at least one token and at most what the workers take."""
        try:
            answer, most = self._policy.begin(view), view.limits.max_num_batched_tokens
            if answer is self._checked[0]:
                return self._checked[1]
            tokens, chunk = index(answer.tokens), index(answer.chunk)
            caps = [None if cap is None else index(cap) for cap in (answer.decodes, answer.prefill, answer.admissions)]
            decodes, prefill, admissions = caps
            budget = StepBudget(tokens, chunk, decodes, prefill, admissions, bool(answer.runner_reports))
            possible = 1 <= tokens <= most and chunk >= 1
            if not possible or any(cap is not None and cap < 0 for cap in caps) or caps[:2] == [0, 0]:
                raise ImpossibleAnswer(f"{budget}, {most} tokens allowed")
            if type(answer) is StepBudget:  # others may change
                self._checked = answer, budget
            return budget
        except Exception as error:
            self._report("begin", error)
            return LEAST

    def order(self, view: SchedulerView) -> SlotIds:
        """Check that the slots are running, each at most once."""
        try:
            rows = self._policy.order(view)
            if rows is view.running:
                return rows
            if not _is_subset(rows, view):
                raise ImpossibleAnswer(f"{rows}, of {view.running}")
            return rows.astype(np.int64)  # a copy: the step keeps it, and the policy may use its own again
        except Exception as error:
            self._report("order", error)
            return view.running

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        """Check that the slice is part of the offer."""
        try:
            taken, counted = map(index, self._policy.admit(view, request, hit, count))
            possible = 0 <= taken <= hit and taken % view.limits.block_size == 0
            if not possible or not 0 <= counted <= count + hit - taken:
                raise ImpossibleAnswer(f"{taken} of {hit} cached tokens and {counted} of {count} more")
            return taken, counted
        except Exception as error:
            self._report("admit", error)
            return hit, count

    def _report(self, method: str, problem: Exception) -> None:
        """Log each kind of failure once."""
        kind = (method, type(problem).__name__)
        if kind not in self._reported:
            self._reported.add(kind)
            log.error(
                "the batching policy failed in %s; the least that makes progress is done instead: %s",
                method,
                problem,
                exc_info=None if isinstance(problem, ImpossibleAnswer) else problem,
            )


def _is_subset(rows: object, view: SchedulerView) -> bool:
    if not isinstance(rows, np.ndarray) or rows.ndim != 1 or rows.dtype.kind != "i":
        return False
    live = view.slots.state[rows] == LIVE
    return bool(live.all()) and (not len(rows) or int(np.bincount(rows).max()) == 1)  # of negative ones it raises
