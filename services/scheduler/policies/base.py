from dataclasses import dataclass
from typing import Protocol

from services.scheduler.slots import Rows


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """The running requests in order of rank, read-only; columns with a row per request."""

    slots: Rows
    num_waiting: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class StepBudget:
    """What one step may hold."""

    tokens: int
    """Most tokens in the step, at least 1."""
    chunk: int
    """Most tokens of one request in the step, at least 1."""


class BatchingPolicy(Protocol):
    def begin(self, view: SchedulerView) -> StepBudget:
        """Called once at the start of each `schedule()`."""
        ...

    def order(self, view: SchedulerView) -> Rows:
        """The running slots in the order in which they take from the budget; leaving one out hides it this step."""
        ...
