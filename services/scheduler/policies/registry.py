"""Batching policies by name: the built-in ones, and those that installed packages register.

A package registers a policy as a Python entry point of the group `runahead.policies`. The entry point refers to a class
that is a `ConfigurablePolicy`. `--batching-policy` accepts its name.
"""

from services.config import SchedulerConfig
from services.plugins import find_class
from services.scheduler.core.limits import Limits
from services.scheduler.policies.balanced import BalancedPolicy
from services.scheduler.policies.base import BatchingPolicy, ConfigurablePolicy
from services.scheduler.policies.chunked import ChunkedPolicy
from services.scheduler.policies.guarded import GuardedPolicy
from services.scheduler.policies.phased import PhasedPolicy

GROUP = "runahead.policies"
BUILT_IN: dict[str, type[ConfigurablePolicy]] = {
    "chunked": ChunkedPolicy,
    "balanced": BalancedPolicy,
    "phased": PhasedPolicy,
}


def find_policy(name: str) -> type[ConfigurablePolicy]:
    """Return the class of a policy.

    Raises: PluginError, if there is no such policy, its entry point does not load, or it is no `ConfigurablePolicy`.
    """
    members = ("from_config", "begin", "order", "admit")
    found: type[ConfigurablePolicy] = find_class("--batching-policy", name, BUILT_IN, GROUP, members)
    return found


def make_policy(config: SchedulerConfig, limits: Limits) -> BatchingPolicy:
    """Return the configured policy for one epoch, guarded.

    Raises: PluginError, if it cannot be found; ValueError, if it cannot work within `limits`.
    """
    name = config.policy
    policy_class = find_policy(name)
    try:
        policy = policy_class.from_config(config, limits)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"--batching-policy {name}: from_config failed: {type(error).__name__}: {error}") from error
    if not isinstance(policy, BatchingPolicy):
        raise ValueError(f"--batching-policy {name}: from_config returned {policy!r}, which is no batching policy")
    return GuardedPolicy(policy)
