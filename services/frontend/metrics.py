"""Metrics for Prometheus: vLLM's names, labels and buckets, with the prefix "runahead:" and once more with "vllm:"."""

import time
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from protocol.requests import ITERATION_TOKENS, Finish
from services.frontend.collectors import LABELS, Count, Total, ValueHistogram, histogram_family
from services.frontend.engine.client import EngineClient
from services.frontend.errors import GONE

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
         2560)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
"""1, 2, 5, 10, ...; vLLM's end at the context length."""
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)

_GAUGES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "inflight_steps", "epoch", "num_workers",
    "grammar_cache_bytes", "grammars_compiling", "weight_loads", "expected_queue_seconds",
}  # fmt: skip
_PART_LABELS = {"wasted_tokens_total": "cause", "admission_rejections": "reason"}
"""Label of the part behind the colon in the name of a statistic; "position", unless it is listed."""
OURS, VLLM = "runahead:", "vllm:"
VLLM_NAMES = frozenset(
    {
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
        "engine_sleep_state", "cache_config_info", "lora_requests_info", "prompt_tokens", "prompt_tokens_by_source",
        "prompt_tokens_cached", "prompt_tokens_cached_by_source", "generation_tokens", "request_success",
        "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "admission_rejections",
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "iteration_tokens_total", "request_max_num_generation_tokens",
        "request_params_n", "request_params_max_tokens", "request_num_preemptions",
        "request_prefill_kv_computed_tokens",
    }
)  # fmt: skip
"""Families that are also shown under vLLM's name."""


class _EngineStatistics(Collector):
    """Statistics that the scheduler reported last."""

    def __init__(self, engine: EngineClient, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

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
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        """Yield gauges whose labels have the information, and the requests that wait by their reason."""
        state = self._engine.state
        named = dict(zip(LABELS, self._labels, strict=True))
        if info := state.info:
            yield InfoMetricFamily(
                f"{OURS}engine", "features that are combined in this engine", value=named | info
            )
        yield InfoMetricFamily(
            f"{OURS}build",
            "version of this frontend",
            value=named | {"version": metadata.version("runahead-engine")},
        )
        resubmitted = CounterMetricFamily(
            f"{OURS}requests_resubmitted", "requests that were submitted to a scheduler again", labels=LABELS
        )
        resubmitted.add_metric(self._labels, self._engine.ledger.resubmitted)
        yield resubmitted
        shed = CounterMetricFamily(
            f"{OURS}requests_shed",
            "requests that were refused for load before they were read",
            labels=LABELS,
        )
        shed.add_metric(self._labels, self._engine.num_shed)
        yield shed
        if state.num_blocks:
            sizes = {
                "block_size": str(state.block_size),
                "num_gpu_blocks": str(state.num_blocks),
                "enable_prefix_caching": state.info.get("prefix_caching", "True"),
            }
            yield _gauge("cache_config_info", "sizes of the KV cache", named | sizes, 1.0)
        yield _gauge("engine_ready", "1 if requests are executed now", named, float(self._engine.ready))
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield _gauge(
            "lora_requests_info",
            "adapters in use: none are served; the value is a time",
            adapters,
            time.time(),
        )
        compiling = state.stats.get("grammars_compiling", 0.0)
        waiting = _gauge(
            "num_requests_waiting_by_reason",
            "requests that wait for room, or for something else (grammars)",
            named | {"reason": "capacity"},
            state.stats.get("num_requests_waiting", 0.0),
        )
        waiting.add_sample(waiting.name, named | {"reason": "deferred"}, compiling)
        yield waiting
        sleep = _gauge("engine_sleep_state", "the engine never sleeps", named | {"sleep_state": "awake"}, 1.0)
        for other in ("weights_offloaded", "discard_all"):
            sleep.add_sample(sleep.name, named | {"sleep_state": other}, 0.0)
        yield sleep


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{OURS}{name}", text)
    family.add_sample(family.name, labels, value)
    return family


class _VllmNames(Collector):
    """The families of VLLM_NAMES once more, under vLLM's names. They cost nothing until they are read."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            name = family.name.removeprefix(OURS)
            if name not in VLLM_NAMES:
                continue
            renamed = Metric(VLLM + name, family.documentation, family.type)
            for sample in family.samples:
                labels = sample.labels
                if name == "admission_rejections":  # has no label `engine` in vLLM
                    labels = {"model_name": labels["model_name"], "reason": labels["reason"]}
                renamed.samples.append(Sample(VLLM + sample.name.removeprefix(OURS), labels, *sample[2:]))
            yield renamed


def outcome_of(status: int) -> str:
    """Return in one word how an HTTP request for an answer ended."""
    outcomes = {200: "completed", GONE: "aborted", 429: "rejected", 503: "rejected"}
    return outcomes.get(status, "failed" if status >= 500 else "invalid")


class AnswerRecord(NamedTuple):
    """Numbers of one choice that ended by itself."""

    finish: str
    """OpenAI's `finish_reason`."""
    seconds: float
    """From the HTTP request to the end."""
    duplicates: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_choices: int = 1
    max_tokens: int = 1
    first_to_last: float = 0.0
    """Seconds from the first token to the last one."""
    end: Finish | None = None
    """None if a stop string ended the choice before the engine did."""


class Metrics:
    """The frontend's metrics, and the last statistics that the scheduler reported."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._registry = CollectorRegistry()
        self._aliases = CollectorRegistry()
        self._aliases.register(_VllmNames(self._registry))
        labels = (model, "0")
        self._registry.register(_EngineStatistics(engine, labels))

        self._histograms: list[ValueHistogram] = []

        def counter(name: str, text: str, *more: str) -> Total:
            total = Total(f"{OURS}{name}", text, more, labels)
            self._registry.register(total)
            return total

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> ValueHistogram:
            made = ValueHistogram(f"{OURS}{name}", text, buckets, labels)
            self._registry.register(made)
            self._histograms.append(made)
            return made

        def seconds(name: str, text: str, buckets: tuple[float, ...] = _LATENCY) -> ValueHistogram:
            return histogram(f"{name}_seconds", text, buckets)

        success = counter("request_success", "answers that completed", "finished_reason")
        self._finished = {reason: success.count(reason) for reason in ("stop", "length", "abort", "error")}
        self._requests = counter("requests", "HTTP requests for answers that ended", "outcome", "code")
        self._by_status: dict[int, Count] = {}
        self._duplicates = counter(
            "duplicate_tokens_dropped", "tokens dropped because they had been delivered before"
        ).count()
        by_source = counter("prompt_tokens_by_source", "prompt tokens by source", "source")
        self._computed_total = by_source.count("local_compute")
        self._cached = (
            counter("prompt_tokens_cached", "prompt tokens that the prefix cache held").count(),
            counter("prompt_tokens_cached_by_source", "the same by source", "source").count(
                "local_cache_hit"
            ),
            by_source.count("local_cache_hit"),
        )
        first_token = seconds("time_to_first_token", "seconds from a request to its first token", _TTFT)
        gap = seconds("inter_token_latency", "seconds between two tokens of an answer", _ITL)
        self.observe_first_token, self.observe_gap = first_token.observe, gap.observe
        self._e2e = seconds("e2e_request_latency", "seconds from a request to its end")
        self._per_token = seconds(
            "request_time_per_output_token", "mean seconds between the tokens of an answer", _ITL
        )
        self._queue = seconds("request_queue_time", "seconds from a request's admission to its first step")
        self._prefill = seconds("request_prefill_time", "seconds from the first step to the first token")
        self._decode = seconds("request_decode_time", "seconds from the first token to the end")
        self._inference = seconds("request_inference_time", "seconds from the first step to the end")
        self._prompt = histogram("request_prompt_tokens", "tokens of a prompt", _TOKENS)
        self._output = histogram("request_generation_tokens", "tokens of an answer", _TOKENS)
        self._most = histogram("request_max_num_generation_tokens", "tokens of an answer", _TOKENS)
        self._n = histogram("request_params_n", "answers per prompt of a request", _CHOICES)
        self._max_tokens = histogram("request_params_max_tokens", "limit of an answer's tokens", _TOKENS)
        self._preemptions = histogram("request_num_preemptions", "preemptions of a request", _PREEMPTIONS)
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "prompt tokens that were computed", _TOKENS
        )

    def on_answer(self, record: AnswerRecord) -> None:
        """Count a choice that ended by itself."""
        self._finished[record.finish].value += 1
        self._e2e.observe(record.seconds)
        self._duplicates.value += record.duplicates
        self._prompt.observe(record.prompt_tokens)
        self._output.observe(record.output_tokens)
        self._most.observe(record.output_tokens)
        self._n.observe(record.num_choices)
        self._max_tokens.observe(record.max_tokens)
        if record.output_tokens > 1:
            self._per_token.observe(record.first_to_last / (record.output_tokens - 1))
        if record.end is not None:
            self._on_finish(record.end, record.prompt_tokens)

    def _on_finish(self, end: Finish, prompt_tokens: int) -> None:
        """Count what only the engine knows."""
        cached = end.num_cached_tokens
        computed = max(prompt_tokens - cached, 0)
        for count in self._cached:
            count.value += cached
        self._computed_total.value += computed
        self._computed.observe(computed)
        self._preemptions.observe(end.num_preemptions)
        times = end.times
        if times is None or not times.scheduled:
            return
        self._queue.observe(times.scheduled - times.queued)
        self._inference.observe(times.ended - times.scheduled)
        if times.first_token:
            self._prefill.observe(times.first_token - times.scheduled)
            self._decode.observe(times.ended - times.first_token)

    def on_request(self, status: int) -> None:
        """Count an HTTP request that has ended. A stream that failed counts with the status of its error."""
        count = self._by_status.get(status)
        if count is None:
            count = self._by_status[status] = self._requests.count(outcome_of(status), str(status))
        count.value += 1

    def fold(self) -> None:
        """Sort observed values into buckets. Call it regularly: until then they are kept."""
        for histogram in self._histograms:
            histogram.fold()

    def render(self) -> bytes:
        return generate_latest(self._registry) + generate_latest(self._aliases)
