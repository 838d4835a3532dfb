"""Batching policies by name: the built-in ones, and those that installed packages register.

A package registers a policy as a Python entry point of the group `runahead.policies`. The entry point refers to a class
that is a `ConfigurablePolicy`. `--batching-policy` accepts its name.
"""

from importlib.metadata import EntryPoint, entry_points

from services.config import SchedulerConfig
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


class PolicyError(ValueError):
    """The configured policy cannot be used. The text is one line for the user."""


def find_policy(name: str) -> type[ConfigurablePolicy]:
    """Return the class of a policy.

    Raises: PolicyError, if there is no such policy, its entry point does not load, or it is no `ConfigurablePolicy`.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    registered = entry_points(group=GROUP)
    found = [*registered.select(name=name)]
    if not found:
        names = ", ".join([*BUILT_IN, *sorted(registered.names)])
        raise PolicyError(f"--batching-policy {name}: there is no such policy; choose one of {names}")
    if len(found) > 1:
        packages = " and ".join(sorted(map(_package, found)))
        raise PolicyError(f"--batching-policy {name}: {packages} register this name; uninstall all but one")
    return _load(name, found[0])


def _load(name: str, point: EntryPoint) -> type[ConfigurablePolicy]:
    where = f"--batching-policy {name}: {point.value} of {_package(point)}"
    try:
        loaded = point.load()
    except Exception as error:
        text = " ".join(str(error).split())
        raise PolicyError(f"{where} does not load: {type(error).__name__}: {text}") from error
    if not isinstance(loaded, type) or not issubclass(loaded, ConfigurablePolicy):
        raise PolicyError(
            f"{where} is no batching policy: it must be a class with the methods from_config, begin, order and admit"
        )
    return loaded


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown package"


def make_policy(config: SchedulerConfig, limits: Limits) -> BatchingPolicy:
    """Return the configured policy for one epoch, guarded.

    Raises: PolicyError, if it cannot be found; ValueError, if it cannot work within `limits`.
    """
    name = config.policy
    policy_class = find_policy(name)
    try:
        policy = policy_class.from_config(config, limits)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"--batching-policy {name}: from_config failed: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(policy, BatchingPolicy):
        raise ValueError(
            f"--batching-policy {name}: from_config returned {policy!r}, which is no batching policy"
        )
    return GuardedPolicy(policy)
