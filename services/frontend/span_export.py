"""Export of OpenTelemetry spans to a collector, with one log line when it fails and one when it works again.

Imports the OpenTelemetry packages (extra `otel`).
"""

import logging
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.config.traces import GRPC, TRACES_PROTOCOL, traces_protocol

log = logging.getLogger("runahead.frontend")

EXPORT_SECONDS = 5
"""Time limit of an export. Spans that cannot be exported are dropped."""


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
