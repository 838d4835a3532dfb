"""A collector of traces in this process, over HTTP or gRPC."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from tests.http_server import Handler, http_server
from tests.integration.frontend.scripted import wait_until


class CollectedSpan(NamedTuple):
    name: str
    trace: str
    id: str
    parent: str
    """"" for a root."""
    began: int
    ended: int
    """Nanoseconds since 1970."""
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    failed: bool


class CollectedTraces:
    """The spans that have arrived."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.raw = b""
        self.refuses = False
        """Exports are answered with an error."""
        self.num_refused = 0

    def add(self, message: ExportTraceServiceRequest) -> bool:
        """Return False for an export that is refused."""
        if self.refuses:
            self.num_refused += 1
            return False
        self.raw += message.SerializeToString()
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(
                    CollectedSpan(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        {entry.key: _value(entry.value) for entry in span.attributes},
                        [(event.name, event.time_unix_nano) for event in span.events],
                        span.status.code == span.status.STATUS_CODE_ERROR,
                    )
                    for span in scope.spans
                )
        return True

    def request(self, request_id: str) -> tuple[CollectedSpan, list[CollectedSpan]]:
        """Wait for the span of a request. Return it and the spans below it, in order of time."""

        def found() -> list[CollectedSpan]:
            return [span for span in self.spans if span.attributes.get("gen_ai.request.id") == request_id]

        wait_until(found, f"the trace of {request_id} has arrived")
        (root,) = found()
        return root, sorted((span for span in self.spans if span.parent == root.id), key=lambda s: s.began)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def over_http() -> Iterator[tuple[str, CollectedTraces]]:
    """Yield the endpoint and the traces that arrive there."""
    collected = CollectedTraces()

    class Collector(Handler):
        def answer(self) -> None:
            assert self.path == "/v1/traces"
            is_added = collected.add(ExportTraceServiceRequest.FromString(self.body()))
            self.reply(200 if is_added else 404)

    with http_server(Collector) as url:
        yield f"{url}/v1/traces", collected


@contextmanager
def over_grpc() -> Iterator[tuple[str, CollectedTraces]]:
    """Yield the endpoint and the traces that arrive there."""
    collected = CollectedTraces()

    class Servicer(TraceServiceServicer):  # type: ignore[misc]  untyped
        def Export(self, request: ExportTraceServiceRequest, call: Any) -> ExportTraceServiceResponse:  # noqa: N802
            if not collected.add(request):
                call.abort(grpc.StatusCode.UNIMPLEMENTED, "no traces here")
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", collected
    finally:
        server.stop(None).wait()


TRANSPORTS: dict[str, Callable[[], Any]] = {"grpc": over_grpc, "http/protobuf": over_http}
