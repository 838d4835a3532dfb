"""Figures for Prometheus, under vLLM's suffixes with our prefix."""

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.frontend.engine_client import EngineClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.frontend.openai.serving import Choice

_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    20,
    40,
    80,
)
_GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "inflight_steps"}


class _Engine(Collector):
    """What the scheduler last reported."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> "Iterator[Metric]":
        for name, value in self._engine.state.stats.items():
            if name in _GAUGES:
                yield GaugeMetricFamily(f"runahead:{name}", f"{name} of the engine", value)
            else:
                yield CounterMetricFamily(
                    f"runahead:{name.removesuffix('_total')}", f"{name} of the engine", value
                )


class Metrics:
    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(engine))
        self._success = Counter(
            "runahead:request_success", "finished answers", ("finished_reason",), registry=self._registry
        )

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"runahead:{name}_seconds", text, buckets=_BUCKETS, registry=self._registry)

        self._ttft = seconds("time_to_first_token", "seconds from a request to its first token")
        self._itl = seconds("inter_token_latency", "seconds between two tokens of an answer")
        self._e2e = seconds("e2e_request_latency", "seconds from a request to its end")

    def on_token(self, choice: "Choice") -> None:
        now = time.monotonic()
        if choice.last_token is None:
            self._ttft.observe(now - choice.started)
        else:
            self._itl.observe(now - choice.last_token)
        choice.last_token = now

    def on_finish(self, choice: "Choice") -> None:
        self._success.labels(choice.finish or "abort").inc()
        self._e2e.observe(time.monotonic() - choice.started)

    def render(self) -> bytes:
        return generate_latest(self._registry)
