"""Checks of the configuration before any service starts."""

import importlib.util
import ipaddress
import os
import socket
import ssl
from pathlib import Path

from services.checkpoint import CheckpointError, is_gguf, is_local, read_json, resolve
from services.checkpoint.default_model import packaged_model
from services.cli.settings import ConfigurationError
from services.config import FrontendConfig, HttpConfig, ServeConfig

TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
EXPORTERS = {
    "grpc": ("opentelemetry.exporter.otlp.proto.grpc", "grpc"),
    "http/protobuf": ("opentelemetry.exporter.otlp.proto.http", "requests"),
}
"""Modules that each protocol needs."""


def check_model(model: str) -> None:
    """Check that a model directory or file exists, and that a GGUF file is complete and supported. The services check
    everything else, and names on the hub.

    Raises:
        ConfigurationError: there is no such directory or file, a directory has several GGUF files, or the file cannot
            be served.
    """
    if is_local(model):
        try:
            path = resolve(model)
            if is_gguf(path) and path != packaged_model():  # which has a fixed hash
                read_json(path, "config.json")
        except CheckpointError as error:
            raise ConfigurationError(str(error)) from None


def check_files(config: ServeConfig) -> None:
    """Check that files that the frontend reads exist, and that no name is a model.

    Raises: ConfigurationError
    """
    if config.chat_template is not None and not Path(config.chat_template).expanduser().is_file():
        raise ConfigurationError(f"--chat-template: cannot read {config.chat_template}: no such file")
    names = config.served_model_name
    if (
        not config.model
        and len(names) > 1
        and (names[-1].lower().endswith(".gguf") or Path(names[-1]).exists())
    ):
        raise ConfigurationError(
            f"{names[-1]} is taken for a name of the model; put MODEL before --served-model-name"
        )


def free_port(host: str, port: int) -> int:
    """Return `port` if it can be bound at `host`; for 0, return a free port.

    Raises:
        ConfigurationError: the port is in use, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}; "
                "choose another with --host or --port"
            ) from None
        return int(probe.getsockname()[1])


def check_tls(config: HttpConfig) -> None:
    """Check the files of the certificate.

    Raises:
        ConfigurationError: a file cannot be read, is not PEM, or certificate and key do not belong together.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    name = "--ssl-certfile"
    try:
        context.load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile, password=""
        )  # never asks on the terminal
        name = "--ssl-ca-certs"
        context.load_verify_locations(config.ssl_ca_certs) if config.ssl_ca_certs is not None else None
    except (OSError, ssl.SSLError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        files = config.ssl_ca_certs if name == "--ssl-ca-certs" else config.ssl_certfile
        key = f" with key {config.ssl_keyfile}" if config.ssl_keyfile and files == config.ssl_certfile else ""
        raise ConfigurationError(f"{name}: cannot use {files}{key}: {_plain(reason)}") from None


def check_traces(config: FrontendConfig | ServeConfig) -> None:
    """Check that traces can be exported if they are enabled.

    Raises:
        ConfigurationError: the OpenTelemetry packages are not installed, or the protocol is unknown.
    """
    if config.otlp_traces_endpoint is None:
        return
    protocol = os.environ.get(TRACES_PROTOCOL, "grpc")
    if protocol not in EXPORTERS:
        raise ConfigurationError(f"{TRACES_PROTOCOL} is {protocol!r}; use {' or '.join(EXPORTERS)}")
    missing = [name for name in ("opentelemetry.sdk", *EXPORTERS[protocol]) if not _is_installed(name)]
    if missing:
        raise ConfigurationError(
            f"--otlp-traces-endpoint needs packages that are not installed ({', '.join(missing)}); "
            "install the extra: pip install 'runahead-engine[otel]'"
        )


def _is_installed(module: str) -> bool:
    """Look for a module without importing it: threads of an imported one would not survive a fork."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that contains it
        return False


def _plain(reason: str | None) -> str:
    """OpenSSL writes KEY_VALUES_MISMATCH."""
    return (reason or "it is not PEM").replace("_", " ").lower()


def warning(config: ServeConfig) -> str | None:
    """Return a warning about an allowed but insecure configuration, or None."""
    try:
        is_private = ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        is_private = config.host == "localhost"
    if is_private or config.api_key or config.uds is not None:
        return None
    return (
        f"WARNING: anyone who can reach {config.host} port {config.port} can use this server: "
        "there is no API key. Set RUNAHEAD_API_KEY (or --api-key), or use --host 127.0.0.1."
    )
