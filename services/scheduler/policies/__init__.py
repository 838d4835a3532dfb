"""What may share a step. A policy answers small questions about a read-only view; no loop, no queue."""

from services.scheduler.policies.base import BatchingPolicy, SchedulerView, StepBudget
from services.scheduler.policies.chunked import ChunkedPolicy
from services.scheduler.policies.phased import PhasedPolicy

__all__ = ["BatchingPolicy", "ChunkedPolicy", "PhasedPolicy", "SchedulerView", "StepBudget"]
