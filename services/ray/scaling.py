"""The number of engines, from the time that a new request would wait: Serve's own policies count open requests, which
differ by orders of magnitude in the work that they are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

BUSY = 0.7
"""Share of the engines that stay which may be in use after one less."""
GROWTH = 2.0
"""Factor by which the number of engines grows at most, until those that start have been measured."""


def wanted(queue_seconds: list[float], busy: list[float], target: float) -> int:
    """Return the number of engines for what the running ones report.

    Args:
        queue_seconds: expected seconds until the first step of a new request, of each engine. Placement sends it to the
            engine where it waits least.
        busy: share of each engine that is in use, of its rows or of its KV cache.
    """
    count, work = len(queue_seconds), sum(queue_seconds)
    if min(queue_seconds) > target:
        return math.ceil(min(work / target, count * GROWTH))
    if max(queue_seconds) < target / 2 and sum(busy) <= BUSY * (count - 1):
        return max(1, count - 1)
    return count


@dataclass
class QueueSeconds:
    """Policy of Serve's autoscaler. Serve bounds the number and applies its delays."""

    target: float

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waits = metrics.get("expected_queue_seconds", {})
        known = [replica for replica in context.running_replicas if replica in waits]
        if not known:
            return context.target_num_replicas, {}
        busy = metrics.get("busy", {})
        number = wanted([waits[r] for r in known], [busy.get(r, 1.0) for r in known], self.target)
        if number >= len(known):  # not fewer because some engines have not reported yet
            number = max(number, context.target_num_replicas)
        return number, {}
