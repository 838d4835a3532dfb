"""Throughput and latencies of a load."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class RequestMeasurement(NamedTuple):
    """Times of one request, seconds on any clock; 0.0: it did not happen."""

    queued: float
    first_token: float
    ended: float
    num_outputs: int


class Figure(NamedTuple):
    name: str
    unit: str
    value: float


@dataclass
class Measurements:
    requests: list[RequestMeasurement] = field(default_factory=list)
    num_preemptions: int = 0
    num_refused: int = 0
    """Requests that do not fit the context or the cache."""

    def figures(self) -> list[Figure]:
        """Return throughput, and mean and 90th percentile of both latencies; nan without requests."""
        served = [request for request in self.requests if request.first_token]
        first = [request.first_token - request.queued for request in served]
        between = [
            (request.ended - request.first_token) / (request.num_outputs - 1)
            for request in served
            if request.num_outputs > 1
        ]
        seconds = max((r.ended for r in served), default=0.0) - min((r.queued for r in served), default=0.0)
        tokens = sum(request.num_outputs for request in served)
        return [
            Figure("throughput", "tokens/s", tokens / seconds if seconds else float("nan")),
            Figure("TTFT, mean", "ms", 1e3 * _mean(first)),
            Figure("TTFT, p90", "ms", 1e3 * _p90(first)),
            Figure("ITL, mean", "ms", 1e3 * _mean(between)),
            Figure("ITL, p90", "ms", 1e3 * _p90(between)),
            Figure("preemptions", "", float(self.num_preemptions)),
        ]


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _p90(values: list[float]) -> float:
    return float(np.percentile(values, 90)) if values else float("nan")
