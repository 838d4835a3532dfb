"""Batching policies decide which requests share a step. A policy reads a view; it has no loop and no queue."""

from services.scheduler.policies.balanced import BalancedPolicy
from services.scheduler.policies.base import BatchingPolicy, ConfigurablePolicy, SchedulerView, StepBudget
from services.scheduler.policies.chunked import ChunkedPolicy
from services.scheduler.policies.guarded import GuardedPolicy
from services.scheduler.policies.phased import PhasedPolicy
from services.scheduler.policies.registry import BUILT_IN, find_policy, make_policy
