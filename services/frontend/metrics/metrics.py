"""Metrics of this frontend's answers and requests."""

import asyncio
from collections.abc import Iterator
from http import HTTPMethod

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from starlette.types import Scope

from protocol.requests import Finish
from services.frontend.engine.client import EngineClient
from services.frontend.errors import GONE
from services.frontend.metrics.collectors import OURS, Total, ValueHistogram
from services.frontend.metrics.engine_statistics import EngineStatistics
from services.frontend.metrics.vllm_names import with_vllm_names
from services.frontend.openai.tasks import ANSWER_PATHS
from services.frontend.request_summary import EndedChoice

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
         2560)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REFUSAL = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10,
            60)  # fmt: skip
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
"""1, 2, 5, 10, ...; vLLM's end at the context length."""
_CHOICES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_OUTCOMES = {200: "completed", GONE: "aborted", 429: "rejected", 503: "rejected"}
_STATUSES = (200, 400, 429, GONE, 500, 503, 504)
"""Statuses that are counted from 0 on: the rate of a series that begins with its first requests has none of them."""
_UNCOUNTED = frozenset({"/health", "/livez", "/load", "/metrics", "/ping", "/readyz", "/server_info", "/version"})
"""Paths that monitoring asks for."""


def outcome_of(status: int) -> str:
    """Return in one word how an HTTP request for an answer ended."""
    return _OUTCOMES.get(status, "failed" if status >= 500 else "invalid")


class Metrics:
    """The frontend's metrics, and the last statistics that the scheduler reported."""

    def __init__(self, engine: EngineClient, model: str) -> None:
        self._registry = CollectorRegistry()
        labels = (model, "0")
        self._registry.register(EngineStatistics(engine, labels))

        self._histograms: list[ValueHistogram] = []

        def counter(name: str, text: str, *more: str) -> Total:
            """`more`: names of labels."""
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

        self._finished = counter("request_success", "answers that completed", "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self._finished.add(reason, count=0)
        self._requests = counter("requests", "HTTP requests for answers that ended", "outcome", "code")
        for status in _STATUSES:
            self._requests.add(outcome_of(status), str(status), count=0)
        self._http = Total("http_requests", "HTTP responses", ("handler", "method", "status"), ())
        self._registry.register(self._http)
        dropped = "tokens dropped because they had been delivered before"
        self._duplicates = counter("duplicate_tokens_dropped", dropped)
        self._duplicates.add(count=0)
        self._by_source = counter("prompt_tokens_by_source", "prompt tokens by source", "source")
        self._cached = counter("prompt_tokens_cached", "prompt tokens that the prefix cache held")
        self._cached_by_source = counter("prompt_tokens_cached_by_source", "the same by source", "source")
        self._count_prompt(computed=0, cached=0)
        first_token = seconds("time_to_first_token", "seconds from a request to its first token", _TTFT)
        gap = seconds("inter_token_latency", "seconds between two tokens of an answer", _ITL)
        self.observe_first_token, self.observe_gap = first_token.observe, gap.observe
        waited = "seconds from the last bytes of a request to its refusal with 429 or 503"
        self.observe_refusal = seconds("request_refusal", waited, _REFUSAL).observe
        self._e2e = seconds("e2e_request_latency", "seconds from a request to its end")
        self._per_token = seconds("request_time_per_output_token", "mean seconds between the tokens of an answer", _ITL)
        self._queue = seconds("request_queue_time", "seconds from a request's admission to its first step")
        self._prefill = seconds("request_prefill_time", "seconds from the first step to the first token")
        self._decode = seconds("request_decode_time", "seconds from the first token to the end")
        self._inference = seconds("request_inference_time", "seconds from the first step to the end")
        self._prompt = histogram("request_prompt_tokens", "tokens of a prompt", _TOKENS)
        self._output = histogram("request_generation_tokens", "tokens of an answer", _TOKENS)
        self._most = histogram("request_max_num_generation_tokens", "tokens of a prompt's longest answer", _TOKENS)
        self._n = histogram("request_params_n", "answers per prompt of a request", _CHOICES)
        self._max_tokens = histogram("request_params_max_tokens", "limit of an answer's tokens", _TOKENS)
        self._preemptions = histogram("request_num_preemptions", "preemptions of a request", _PREEMPTIONS)
        self._computed = histogram("request_prefill_kv_computed_tokens", "prompt tokens that were computed", _TOKENS)

    def on_answer(self, choice: EndedChoice) -> None:
        """Count a choice that ended by itself."""
        self._finished.add(choice.reason)
        self._e2e.observe(choice.ended - choice.submitted)
        self._duplicates.add(count=choice.duplicates)
        self._prompt.observe(choice.prompt_tokens)
        self._output.observe(choice.output_tokens)
        if choice.longest is not None:
            self._most.observe(choice.longest)
            self._n.observe(choice.num_choices)
        self._max_tokens.observe(choice.max_tokens)
        first, last, tokens = choice.first_token, choice.last_token, choice.output_tokens
        if tokens > 1:
            seconds = 0.0 if first is None or last is None else last - first
            self._per_token.observe(seconds / (tokens - 1))
        if (cached := choice.cached_tokens) is not None:
            computed = max(choice.prompt_tokens - cached, 0)
            self._count_prompt(computed, cached)
            self._computed.observe(computed)
        if choice.end is not None:
            self._on_finish(choice.end)

    def _on_finish(self, end: Finish) -> None:
        """Count what only the engine knows at the end."""
        self._preemptions.observe(end.num_preemptions)
        times = end.times
        if times is None or not times.scheduled:
            return
        self._queue.observe(times.scheduled - times.queued)
        self._inference.observe(times.ended - times.scheduled)
        if times.first_token:
            self._prefill.observe(times.first_token - times.scheduled)
            self._decode.observe(times.ended - times.first_token)

    def _count_prompt(self, computed: int, cached: int) -> None:
        """Count prompt tokens that were computed, and those that the prefix cache held."""
        self._by_source.add("local_compute", count=computed)
        self._by_source.add("local_cache_hit", count=cached)
        self._cached.add(count=cached)
        self._cached_by_source.add("local_cache_hit", count=cached)

    def on_request(self, status: int) -> None:
        """Count an HTTP request that has ended. A stream that failed counts with the status of its error."""
        self._requests.add(outcome_of(status), str(status))

    def on_response(self, scope: Scope, status: int) -> None:
        """Count a response by its route, as vLLM does: not those to probes. One that is refused before it is routed has
        a route only if it is for an answer."""
        path, method = scope["path"], scope["method"]
        if path not in _UNCOUNTED:
            route = scope["route"].path if "route" in scope else path if path in ANSWER_PATHS else "none"
            self._http.add(route, method if method in HTTPMethod.__members__ else "none", f"{status // 100}xx")

    def fold(self) -> None:
        """Sort observed values into buckets. Call it regularly: until then they are kept."""
        for histogram in self._histograms:
            histogram.fold()

    async def render(self) -> bytes:
        """Return the text for Prometheus. Between two families the event loop runs other tasks: all of them take more
        than ten milliseconds, in which streams would wait."""
        families = [*self._registry.collect()]
        renamed = [alias for family in families for alias in with_vllm_names(family)]
        parts = []
        for family in families + renamed:
            parts.append(generate_latest(_OneFamily(family)))
            await asyncio.sleep(0)
        return b"".join(parts)


class _OneFamily(CollectorRegistry):
    def __init__(self, family: Metric) -> None:
        super().__init__()
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
