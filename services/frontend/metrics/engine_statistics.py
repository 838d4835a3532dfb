"""Metrics of the engines, from the states that their schedulers reported last."""

import time
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.requests import ITERATION_TOKENS
from services import release
from services.frontend.engine.availability import GAUGES
from services.frontend.engine.client import EngineClient
from services.frontend.engine.engine import ConnectedEngine
from services.frontend.metrics.collectors import LABELS, OURS, histogram_family

DECISIONS = (
    ("place", "placements", "requests that were placed on the engine"),
    ("move", "stream_moves", "streams that moved from the engine to another one"),
    ("hold", "requests_held", "new requests that waited until an engine was ready"),
    ("refuse", "placements_refused", "requests that no engine took"),
)
"""Decisions of placement: name, metric, and its text."""
_PART_LABELS = {
    "wasted_tokens_total": "cause", "admission_rejections": "reason", "num_requests_waiting_by_reason": "reason",
    "kv_tier_bytes": "tier", "kv_tier_hit_tokens_total": "tier",
}  # fmt: skip
"""Label of the part behind the colon in the name of a statistic; "position", unless it is listed."""


class EngineStatistics(Collector):
    """Statistics of each engine under its name, and of this frontend's requests."""

    def __init__(self, engine: EngineClient, labels: tuple[str, str]) -> None:
        """`labels`: of the metrics of this frontend."""
        self._engine = engine
        self._named = dict(zip(LABELS, labels, strict=True))
        self._release = {"version": release.version()}

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        for engine in self._engine.engines.values():
            named = self._named | {"engine": engine.name}
            self._about_steps(families, named, engine.state.stats)
            self._about_an_engine(families, named, engine)
        text, known = "names of KV blocks that engines are known to hold", self._engine.placement.num_block_names
        families.gauge("placement_block_names", text, self._named, float(known))
        text, count = "requests that were submitted to a scheduler again", self._engine.ledger.resubmitted
        families.counter("requests_resubmitted", text, self._named, count)
        text, count = "requests that were refused for load before they were read", self._engine.num_shed
        families.counter("requests_shed", text, self._named, count)
        self._about_adapters(families)
        for state, value in (("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)):
            sleeps = self._named | {"sleep_state": state}
            families.gauge("engine_sleep_state", "the engine never sleeps", sleeps, value)
        yield from families.values()
        yield from self._about_this_frontend()

    @staticmethod
    def _about_steps(families: "_Families", named: dict[str, str], reported: Mapping[str, float]) -> None:
        """Add statistics as they were reported. What follows a colon in a name is a label."""
        stats = dict(reported)
        if (total := stats.pop("iteration_tokens_sum", None)) is not None:
            counts = [stats.pop(f"iteration_tokens:{i}", 0.0) for i in range(len(ITERATION_TOKENS) + 1)]
            name, text = f"{OURS}iteration_tokens_total", "tokens of a step"
            found = histogram_family(name, text, ITERATION_TOKENS, counts, total, (*named.values(),))
            families.setdefault(name, found)
            if families[name] is not found:
                families[name].samples += found.samples
        for key, value in stats.items():
            name, _, part = key.partition(":")
            own = named | {_PART_LABELS.get(name, "position"): part} if part else named
            add = families.gauge if name in GAUGES else families.counter
            add(name.removesuffix("_total"), f"{name} of the engine", own, value)

    @staticmethod
    def _about_an_engine(families: "_Families", named: dict[str, str], engine: ConnectedEngine) -> None:
        state = engine.state
        if state.info:
            name, text = f"{OURS}engine", "features that are combined in this engine"
            families.setdefault(name, InfoMetricFamily(name, text)).add_sample(f"{name}_info", state.info | named, 1)
        if state.num_blocks:
            sizes = {
                "block_size": str(state.block_size),
                "num_gpu_blocks": str(state.num_blocks),
                "enable_prefix_caching": state.info.get("prefix_caching", ""),
            }
            families.gauge("cache_config_info", "sizes of the KV cache", named | sizes, 1.0)
        ready = "1 if requests are executed now"
        families.gauge("engine_ready", ready, named, float(engine.ready))

    def _about_this_frontend(self) -> Iterator[Metric]:
        yield InfoMetricFamily(f"{OURS}build", "version of this frontend", value=self._named | self._release)
        families = {
            decision: CounterMetricFamily(f"{OURS}{name}", text, labels=(*LABELS, "reason"))
            for decision, name, text in DECISIONS
        }
        for (decision, engine, reason), count in self._engine.owners.decisions.items():
            families[decision].add_metric((self._named["model_name"], engine, reason), count)
        yield from families.values()

    def _about_adapters(self, families: "_Families") -> None:
        """Add the LoRA adapters of all engines together; vLLM's metric has no label `engine`."""
        states = [engine.state for engine in self._engine.engines.values()]
        adapters = {
            "max_lora": str(sum(state.max_loras for state in states)),
            "running_lora_adapters": ",".join(sorted({name for state in states for name in state.running_loras})),
            "waiting_lora_adapters": ",".join(sorted({name for state in states for name in state.waiting_loras})),
        }
        families.gauge("lora_requests_info", "adapters of open requests; the value is a time", adapters, time.time())


class _Families(dict[str, Metric]):
    """Families by name; each has the samples of all engines."""

    def gauge(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        """Add a sample."""
        full = f"{OURS}{name}"
        self.setdefault(full, GaugeMetricFamily(full, text)).add_sample(full, labels, value)

    def counter(self, name: str, text: str, labels: dict[str, str], value: float) -> None:
        """Add a sample."""
        full = f"{OURS}{name}"
        self.setdefault(full, CounterMetricFamily(full, text)).add_sample(f"{full}_total", labels, value)
