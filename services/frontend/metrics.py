"""Metrics for Prometheus: vLLM's names, labels and buckets, with the prefix "runahead:"."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.frontend.engine.client import EngineClient
from services.frontend.errors import GONE

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
         2560)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

_GAUGES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "inflight_steps", "epoch", "num_workers",
    "grammar_cache_bytes", "grammars_compiling",
}  # fmt: skip
_LABELS = ("model_name", "engine")


class _EngineStatistics(Collector):
    """Statistics that the scheduler reported last."""

    def __init__(self, engine: EngineClient, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for key, value in self._engine.state.stats.items():
            name, _, position = key.partition(":")
            if name not in families:
                kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
                labels = (*_LABELS, "position") if position else _LABELS
                families[name] = kind(
                    f"runahead:{name.removesuffix('_total')}", f"{name} of the engine", labels=labels
                )
            families[name].add_metric((*self._labels, position) if position else self._labels, value)
        yield from families.values()
        if info := self._engine.state.info:
            named = dict(zip(_LABELS, self._labels, strict=True)) | info
            yield InfoMetricFamily(
                "runahead:engine", "features that are combined in this engine", value=named
            )


class LatencyHistogram(Collector):
    """Histogram without locks, for one thread. With prometheus_client's own, the locks double the cost of a token."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._bounds = [*map(float, buckets), float("inf")]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        counts = map(float, accumulate(self._counts))
        buckets = [*zip(map(floatToGoString, self._bounds), counts, strict=True)]
        family.add_metric(self._labels, buckets, self._sum)
        yield family


def outcome_of(status: int) -> str:
    """Return in one word how an HTTP request for an answer ended."""
    outcomes = {200: "completed", GONE: "aborted", 429: "rejected", 503: "rejected"}
    return outcomes.get(status, "failed" if status >= 500 else "invalid")


class Metrics:
    """The frontend's metrics, and the last statistics that the scheduler reported."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._registry = CollectorRegistry()
        labels = (model, "0")
        self._registry.register(_EngineStatistics(engine, labels))

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"runahead:{name}", text, (*_LABELS, *more), registry=self._registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...]) -> LatencyHistogram:
            histogram = LatencyHistogram(f"runahead:{name}_seconds", text, buckets, labels)
            self._registry.register(histogram)
            return histogram

        self._labels = labels
        self._success = counter("request_success", "answers that completed", "finished_reason")
        self._requests = counter("requests", "HTTP requests for answers that ended", "outcome", "code")
        self._duplicates = counter(
            "duplicate_tokens_dropped", "tokens dropped because they had been delivered before"
        )
        self.ttft = seconds("time_to_first_token", "seconds from a request to its first token", _TTFT)
        self.itl = seconds("inter_token_latency", "seconds between two tokens of an answer", _ITL)
        self.e2e = seconds("e2e_request_latency", "seconds from a request to its end", _E2E)

    def on_answer(self, finish: str, seconds: float, duplicates: int) -> None:
        """Count a choice that ended by itself."""
        self._success.labels(*self._labels, finish).inc()
        self.e2e.observe(seconds)
        if duplicates:
            self._duplicates.labels(*self._labels).inc(duplicates)

    def on_request(self, status: int) -> None:
        """Count an HTTP request that has ended. A stream that failed counts with the status of its error."""
        self._requests.labels(*self._labels, outcome_of(status), str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)
