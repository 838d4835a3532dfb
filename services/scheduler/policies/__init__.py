"""What may share a step. A policy answers small questions about a read-only view; no loop, no queue."""

from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.policies.balanced import BalancedPolicy
from services.scheduler.policies.base import BatchingPolicy, SchedulerView, StepBudget
from services.scheduler.policies.chunked import ChunkedPolicy
from services.scheduler.policies.guarded import GuardedPolicy
from services.scheduler.policies.phased import PhasedPolicy

__all__ = [
    "BalancedPolicy",
    "BatchingPolicy",
    "ChunkedPolicy",
    "GuardedPolicy",
    "PhasedPolicy",
    "SchedulerView",
    "StepBudget",
    "make_policy",
]


def make_policy(config: SchedulerConfig, limits: Limits) -> BatchingPolicy:
    """What `--batching-policy` names. Raises: ValueError, if it cannot work within `limits`."""
    match config.policy:
        case "chunked":
            return GuardedPolicy(ChunkedPolicy(config.long_prefill_token_threshold))
        case "balanced":
            return GuardedPolicy(BalancedPolicy(config.long_prefill_token_threshold))
        case "phased":
            return GuardedPolicy(
                PhasedPolicy(
                    limits, config.phased_interleave, config.phased_max_volume, config.phased_pausing
                )
            )
