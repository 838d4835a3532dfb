"""OpenTelemetry traces: one per HTTP request, built from recorded times when the request has ended.

Spans: the request (kind SERVER) and below it, for each choice, `queue`, `prefill`, `decode` and `detokenise`. The
scheduler's times are data of the request's `Finish`, so a token costs nothing, and no other service sends spans. Losses
of workers or of the scheduler are events of the requests that were open. No text of a request is exported.

Imports the OpenTelemetry packages (extra `otel`); this module is imported only if traces are exported.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request as HTTPRequest

from services.config.traces import GRPC, TRACES_PROTOCOL, traces_protocol
from services.frontend.engine.client import EngineClient
from services.frontend.request_summary import EndedChoice, RequestSummary

log = logging.getLogger("runahead.frontend")

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
"""GenAI operations by route; other routes compute embeddings."""

EXPORT_SECONDS = 5
"""Time limit of an export. Spans that cannot be exported are dropped."""

Attributes = Mapping[str, str | int | float | list[str]]


def phases(choice: EndedChoice) -> list[tuple[str, float, float]]:
    """Return name, beginning and end of the phases of a choice that are known, in monotonic seconds of this process.

    The scheduler's clock is another one. With the offset between the clocks, the request was queued after it was
    submitted here, and ended before its end was seen here. The first bound is the closer one, as the end may have
    waited for a slow client; it says little if another scheduler continued the request.
    """
    found = []
    times = choice.end.times if choice.end is not None else None
    if times is not None and times.ended:
        earliest, latest = choice.submitted - times.queued, choice.ended - times.ended
        offset = latest if choice.is_resumed else min(earliest, latest)
        found += [(name, began + offset, ended + offset) for name, began, ended in times.phases()]
    if choice.first_token is not None:
        found.append(("detokenise", choice.first_token, choice.ended))
    return found


class TraceExporter:
    """Sends the traces of requests that have ended, in batches, from a thread of its own."""

    def __init__(self, endpoint: str, model: str, engine: EngineClient) -> None:
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "runahead")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(CollectorExporter(endpoint)))
        self._tracer = self._provider.get_tracer("runahead.frontend")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        self._engine = engine

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def export(self, http: HTTPRequest) -> None:
        """Add the trace of a request that has ended."""
        summary: RequestSummary = http.state.summary
        ended = summary.started + summary.seconds
        offset = time.time() - time.monotonic()

        def wall(moment: float) -> int:
            """Convert monotonic seconds to nanoseconds since 1970."""
            return int((moment + offset) * 1e9)

        operation = _OPERATIONS.get(summary.route, "embeddings")
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._parent(http),
            kind=SpanKind.SERVER,
            start_time=wall(summary.started),
            attributes={
                "gen_ai.operation.name": operation,
                "http.request.method": "POST",
                "http.route": summary.route,
                "http.response.status_code": summary.status,
                **self._request_attributes(summary),
            },
        )
        if summary.status >= 500:
            span.set_attribute("error.type", str(summary.status))
            span.set_status(StatusCode.ERROR, summary.reason)
        engines = summary.engines
        recoveries = [event for event in self._engine.recoveries if summary.started <= event.at <= ended]
        recoveries = [event for event in recoveries if not engines or event.engine in engines]
        for event in recoveries:
            named = {"runahead.reason": event.reason, "runahead.engine": event.engine}
            span.add_event(event.name, named, wall(event.at))
        below = set_span_in_context(span)
        for index, choice in enumerate(summary.choices or ()):
            self._add_phases(below, index, choice, wall)
        span.end(wall(ended))

    def _parent(self, http: HTTPRequest) -> Context | None:
        names = ("traceparent", "tracestate")
        carrier = {name: value for name in names if (value := http.headers.get(name)) is not None}
        return self._propagator.extract(carrier) if carrier else None

    def _request_attributes(self, summary: RequestSummary) -> Attributes:
        """Return attributes of the GenAI conventions, and those that vLLM adds to them."""
        params = summary.params
        found: dict[str, str | int | float | list[str] | None] = {
            "gen_ai.provider.name": "runahead",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": summary.request_id,
            "gen_ai.usage.input_tokens": summary.prompt_tokens,
            "gen_ai.usage.output_tokens": summary.output_tokens,
            "gen_ai.usage.prompt_tokens": summary.prompt_tokens,
            "gen_ai.usage.completion_tokens": summary.output_tokens,
            "gen_ai.latency.e2e": summary.seconds,
            "gen_ai.latency.time_to_first_token": summary.first_token,
            "gen_ai.latency.time_in_queue": summary.queued,
            "gen_ai.request.max_tokens": None if params is None else params.max_tokens,
            "gen_ai.request.temperature": None if params is None else params.temperature,
            "gen_ai.request.top_p": None if params is None else params.top_p,
        }
        if summary.choices:
            found["gen_ai.request.choice.count"] = len(summary.choices)
            found["gen_ai.response.finish_reasons"] = [choice.reason for choice in summary.choices]
        return {name: value for name, value in found.items() if value is not None}

    def _add_phases(self, below: Context, index: int, choice: EndedChoice, wall: Callable[[float], int]) -> None:
        for name, began, ended in phases(choice):
            attributes: dict[str, int] = {"runahead.choice": index}
            if name == "prefill" and choice.cached_tokens is not None:
                attributes["runahead.cached_tokens"] = choice.cached_tokens
            if name == "decode" and choice.end is not None:
                attributes["runahead.preemptions"] = choice.end.num_preemptions
                attributes["runahead.draft_tokens"] = choice.end.num_draft_tokens
                attributes["runahead.accepted_tokens"] = choice.end.num_accepted_tokens
            if name == "detokenise":
                attributes["gen_ai.usage.output_tokens"] = choice.output_tokens
            start = wall(began)
            span = self._tracer.start_span(name, context=below, start_time=start, attributes=attributes)
            span.end(max(wall(ended), start))


class CollectorExporter(SpanExporter):
    """Exports spans and logs the changes between success and failure. The exporters of OpenTelemetry log each failure;
    their lines give the reason."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint, self._exporter = endpoint, _exporter(endpoint)
        self._fails = False
        self._reasons = _FirstLine()
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.addHandler(self._reasons)
        exporters.propagate = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._reasons.text = ""
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            log.warning(
                "traces are dropped: %s; check that a collector at --otlp-traces-endpoint %s accepts %s (%s); the next "
                "line about traces follows when they are exported again",
                *(self._reasons.text or "the export failed", self._endpoint, traces_protocol(), TRACES_PROTOCOL),
            )
        elif self._fails and not fails:
            log.info("traces are exported to %s again", self._endpoint)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _FirstLine(logging.Handler):
    """Keeps the text of the first warning since `text` was cleared: the later ones report only that retries ended."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.text = self.text or " ".join(record.getMessage().split()).rstrip(".")


def _exporter(endpoint: str) -> SpanExporter:
    if traces_protocol() == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint, insecure=not endpoint.startswith("https:"), timeout=EXPORT_SECONDS)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint, timeout=EXPORT_SECONDS)
