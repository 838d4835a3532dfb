"""A random policy, so that the scheduler does not depend on habits of the real ones."""

from random import Random

import numpy as np

from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies import (
    BalancedPolicy,
    BatchingPolicy,
    ChunkedPolicy,
    PhasedPolicy,
    SchedulerView,
    StepBudget,
)
from tests.simulation.workload import Workload


class RandomPolicy:
    """Random budgets, chunks and orders, with rows left out; deterministic by its seed."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def begin(self, view: SchedulerView) -> StepBudget:
        rng = self._rng
        tokens = rng.randint(1, view.limits.max_num_batched_tokens)
        decodes, prefill = (rng.choice((None, None, rng.randint(1, tokens))) for _ in range(2))
        return StepBudget(tokens, rng.randint(1, tokens), decodes, prefill, rng.choice((None, 1)))

    def order(self, view: SchedulerView) -> SlotIds:
        slots: list[int] = view.running.tolist()
        shown = [slot for slot in slots if self._rng.random() < 0.8] or slots[:1]
        self._rng.shuffle(shown)
        return np.array(shown, np.int64)

    def admit(self, view: SchedulerView, request: Request, hit: int, count: int) -> tuple[int, int]:
        size = view.limits.block_size
        fewer = self._rng.randint(0, hit // size) * size if self._rng.random() < 0.3 else hit
        return fewer, self._rng.randint(1, count)


def build(load: Workload, limits: Limits, seed: int) -> BatchingPolicy:
    """Return the workload's policy for the limits of an epoch."""
    match load.policy:
        case "random":
            return RandomPolicy(seed)
        case "chunked":
            return ChunkedPolicy(load.threshold)
        case "balanced":
            return BalancedPolicy(load.threshold)
        case "phased":
            return PhasedPolicy(limits, interleave=seed % 3 > 0)
    raise ValueError(f"no policy is called {load.policy!r}")


def conserves_work(load: Workload) -> bool:
    """Return whether the policy guarantees work conservation."""
    return load.policy in ("chunked", "balanced")
