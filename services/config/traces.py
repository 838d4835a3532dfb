"""The transport of OpenTelemetry traces, which its own environment variable chooses."""

import os

TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
GRPC, HTTP = "grpc", "http/protobuf"


def traces_protocol() -> str:
    """Return the protocol, as with vLLM gRPC by default; it may be neither of the two."""
    return os.environ.get(TRACES_PROTOCOL, GRPC)
