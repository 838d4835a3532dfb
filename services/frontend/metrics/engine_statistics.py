"""Metrics of the engine, from the state that the scheduler reported last."""

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.requests import ITERATION_TOKENS
from services import release
from services.frontend.engine.client import EngineClient
from services.frontend.metrics.collectors import LABELS, OURS, histogram_family

_GAUGES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "inflight_steps", "epoch", "num_workers",
    "grammar_cache_bytes", "grammars_compiling", "weight_loads", "expected_queue_seconds",
}  # fmt: skip
_PART_LABELS = {"wasted_tokens_total": "cause", "admission_rejections": "reason"}
"""Label of the part behind the colon in the name of a statistic; "position", unless it is listed."""


class EngineStatistics(Collector):
    def __init__(self, engine: EngineClient, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels
        self._named = dict(zip(LABELS, labels, strict=True))
        self._release = {"version": release.version()}

    def collect(self) -> Iterator[Metric]:
        stats = dict(self._engine.state.stats)
        if (total := stats.pop("iteration_tokens_sum", None)) is not None:
            counts = [stats.pop(f"iteration_tokens:{i}", 0.0) for i in range(len(ITERATION_TOKENS) + 1)]
            yield histogram_family(
                f"{OURS}iteration_tokens_total",
                "tokens of a step",
                ITERATION_TOKENS,
                counts,
                total,
                self._labels,
            )
        yield from self._by_name(stats)
        yield from self._about_the_engine()
        yield from self._about_this_frontend()
        yield from self._about_waiting()
        yield from self._always_the_same()

    def _by_name(self, stats: dict[str, float]) -> Iterator[Metric]:
        """Yield statistics as they were reported. What follows a colon in a name is a label."""
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for key, value in stats.items():
            name, _, part = key.partition(":")
            if name not in families:
                kind = GaugeMetricFamily if name in _GAUGES else CounterMetricFamily
                labels = (*LABELS, _PART_LABELS.get(name, "position")) if part else LABELS
                families[name] = kind(
                    f"{OURS}{name.removesuffix('_total')}", f"{name} of the engine", labels=labels
                )
            families[name].add_metric((*self._labels, part) if part else self._labels, value)
        yield from families.values()

    def _about_the_engine(self) -> Iterator[Metric]:
        state = self._engine.state
        if state.info:
            about = "features that are combined in this engine"
            yield InfoMetricFamily(f"{OURS}engine", about, value=self._named | state.info)
        if state.num_blocks:
            sizes = {
                "block_size": str(state.block_size),
                "num_gpu_blocks": str(state.num_blocks),
                "enable_prefix_caching": state.info.get("prefix_caching", ""),
            }
            yield _gauge("cache_config_info", "sizes of the KV cache", self._named | sizes, 1.0)
        ready = float(self._engine.ready)
        yield _gauge("engine_ready", "1 if requests are executed now", self._named, ready)

    def _about_this_frontend(self) -> Iterator[Metric]:
        yield InfoMetricFamily(f"{OURS}build", "version of this frontend", value=self._named | self._release)
        for name, text, value in (
            (
                "requests_resubmitted",
                "requests that were submitted to a scheduler again",
                self._engine.ledger.resubmitted,
            ),
            (
                "requests_shed",
                "requests that were refused for load before they were read",
                self._engine.num_shed,
            ),
        ):
            family = CounterMetricFamily(f"{OURS}{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family

    def _about_waiting(self) -> Iterator[Metric]:
        stats, name = self._engine.state.stats, "num_requests_waiting_by_reason"
        text = "requests that wait for room, or for something else (grammars)"
        room = self._named | {"reason": "capacity"}
        waiting = _gauge(name, text, room, stats.get("num_requests_waiting", 0.0))
        compiling = stats.get("grammars_compiling", 0.0)
        waiting.add_sample(waiting.name, self._named | {"reason": "deferred"}, compiling)
        yield waiting

    def _always_the_same(self) -> Iterator[Metric]:
        """Yield families that routers expect of vLLM, for features that this engine does not have."""
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        text = "adapters in use: none are served; the value is a time"
        yield _gauge("lora_requests_info", text, adapters, time.time())
        awake = self._named | {"sleep_state": "awake"}
        sleep = _gauge("engine_sleep_state", "the engine never sleeps", awake, 1.0)
        for other in ("weights_offloaded", "discard_all"):
            sleep.add_sample(sleep.name, self._named | {"sleep_state": other}, 0.0)
        yield sleep


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{OURS}{name}", text)
    family.add_sample(family.name, labels, value)
    return family
