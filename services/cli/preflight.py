"""Checks of the configuration, and the API keys of a file, before any service starts."""

import contextlib
import importlib.util
import os
import re
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from protocol.fields import MAX_IPC_PATH
from services.checkpoint import CheckpointError, is_gguf, is_local, read_json, resolve
from services.checkpoint.default_model import packaged_model
from services.cli.settings import ConfigurationError, file_to_write, refusing, refusing_os_errors, text_of_file
from services.config import BackendConfig, FrontendConfig, HttpConfig, SchedulerConfig, ServeConfig, ServiceConfig, flag
from services.config.traces import GRPC, HTTP, TRACES_PROTOCOL, traces_protocol
from services.plugins import PluginError
from services.private import make_output, make_private, make_shared
from services.worker import machine

HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?(:[\w.-]+)?", re.ASCII)
"""A repository, or one of its GGUF files."""
HUB_SECONDS = 2.0
"""Time limit of a connection to the hub."""
EXPORTERS = {
    GRPC: ("opentelemetry.exporter.otlp.proto.grpc", "grpc"),
    HTTP: ("opentelemetry.exporter.otlp.proto.http", "requests"),
}
"""Modules that each protocol needs."""
_PORTS, _TRIES = range(20_000, 32_768), 20
"""Ports below those that the kernel gives outgoing connections, and how many are tried."""

F = TypeVar("F", bound=FrontendConfig)


def with_keys(config: F) -> F:
    """Return `config` with the keys of its `api_key_file` added to its `api_key`: of a file, they appear neither in a
    list of processes nor in a container's description.

    Raises: ConfigurationError: the file cannot be read, or contains no key, which would open the API to everyone, or
        one that `check_keys` refuses.
    """
    if not config.api_key_file:
        return config
    lines = text_of_file("api_key_file", config.api_key_file).splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigurationError(f"--api-key-file: {config.api_key_file} contains no key; write one per line")
    with refusing(ValueError, prefix="--api-key-file: "):
        return config.model_copy(update={"api_key": [*config.api_key, *config.check_keys(keys)], "api_key_file": None})


def check(config: ServiceConfig) -> None:
    """Check the files, directories, addresses and policies of a service, or of those that `config` has together.

    Raises: ConfigurationError
    """
    if isinstance(config, HttpConfig):
        _check_tls(config)
        _check_socket(config)
    if isinstance(config, FrontendConfig):
        _check_template(config)
        check_placement(config)
        _check_traces(config)
        _check_directory("response_store_dir", config.response_store_dir, make_shared)
    if isinstance(config, ServeConfig):
        _check_names(config)
    if isinstance(config, SchedulerConfig):
        check_policy(config)
        if config.step_trace:
            file_to_write("step_trace", config.step_trace)
        _check_kv_events(config)
        _check_directory("record", config.record, make_output)
    if isinstance(config, BackendConfig):
        _check_threads(config)
        check_tiers(config)


def check_model(model: str) -> None:
    """Check that a model directory or file exists, that a GGUF file is complete and supported, and that the hub can be
    reached for a name that is not in its cache. The services check everything else, and whether the hub has the name.

    Raises: ConfigurationError: there is no such directory or file, a directory has several GGUF files, the file cannot
    be served, or the hub cannot have such a name.
    """
    if not is_local(model) and not HUB_NAME.fullmatch(model):
        raise ConfigurationError(
            f"model {model}: no such directory, and not a name on the hub, which is ORGANISATION/NAME"
        )
    if not is_local(model):
        _check_hub(model.partition(":")[0])
    else:
        with refusing(CheckpointError):
            path = resolve(model)
            if is_gguf(path) and path != packaged_model():  # which has a fixed hash
                read_json(path, "config.json")


def _check_hub(name: str) -> None:
    """Raises: ConfigurationError, if the hub must be reached for a repository, and cannot be"""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    if cache.is_dir() and any(cache.iterdir()):
        return
    place = f"model {name}: no such directory, not in the hub's cache"
    remedy = "download it first, or give a directory or a GGUF file"
    if constants.HF_HUB_OFFLINE:
        raise ConfigurationError(f"{place}, and HF_HUB_OFFLINE is set; {remedy}")
    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    if address.scheme in getproxies() and not proxy_bypass(host):
        return
    reached: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=HUB_SECONDS):
            reached.append(True)

    connecting = threading.Thread(target=connect, daemon=True)  # a resolver without a network has no time limit
    connecting.start()
    connecting.join(HUB_SECONDS)
    if not reached:
        raise ConfigurationError(f"{place}, and the hub cannot be reached ({host} port {port}); {remedy}")


def _check_socket(config: HttpConfig) -> None:
    """Raises: ConfigurationError, if the path of the server's socket cannot be that of one"""
    if config.uds is None:
        return
    if not 0 < len(os.fsencode(config.uds)) <= MAX_IPC_PATH:
        raise ConfigurationError(f"--uds: {config.uds!r} is no path of 1 to {MAX_IPC_PATH} bytes, as a socket needs")
    if Path(config.uds).is_file():
        raise ConfigurationError(f"--uds: {config.uds} is a file; give a path that a socket can have")
    file_to_write("uds", config.uds)


def _check_names(config: ServeConfig) -> None:
    """Raises: ConfigurationError, if one of the model's names is a model"""
    names = config.served_model_name
    if not config.model and len(names) > 1 and (names[-1].lower().endswith(".gguf") or Path(names[-1]).exists()):
        raise ConfigurationError(f"{names[-1]} is taken for a name of the model; put MODEL before --served-model-name")


def _check_template(config: FrontendConfig) -> None:
    """Raises: ConfigurationError, if the file cannot be read, or is no Jinja template"""
    if (name := config.chat_template) is None:
        return
    from jinja2 import TemplateSyntaxError

    from services.frontend.templates.sandbox import Sandbox

    try:
        Sandbox().parse(text_of_file("chat_template", name))
    except TemplateSyntaxError as error:
        raise ConfigurationError(f"--chat-template: {name}, line {error.lineno}: {error.message}") from None


def check_placement(config: FrontendConfig) -> None:
    """Raises: ConfigurationError, if the placement policy cannot be used, or its recording cannot be written"""
    from services.frontend.placement import find_placement_policy

    with refusing(PluginError):
        find_placement_policy(config.placement_policy)
    if config.record_placement is not None:
        from services.frontend.engine.placement_recording import PlacementRecording

        with refusing_os_errors(f"--record-placement {config.record_placement}: "):
            PlacementRecording(config.record_placement).close()


def _check_threads(config: BackendConfig) -> None:
    """Raises: ConfigurationError, if there are more threads than processors, which would only wait for one another"""
    if config.threads > (most := os.cpu_count() or 1):
        raise ConfigurationError(
            f"--threads {config.threads}: this machine has {most} processors; use at most {most}, or 0 for one thread "
            f"on each that this process may use ({machine.cores()})"
        )


def check_policy(config: SchedulerConfig) -> None:
    """Raises: ConfigurationError, if the batching policy does not exist"""
    from services.scheduler.policies import find_policy

    with refusing(PluginError):
        find_policy(config.policy)


def check_tiers(config: BackendConfig) -> None:
    """Make the directory of KV blocks, and check the address for other engines.

    Raises: ConfigurationError, if one cannot be used
    """
    if config.kv_peer_address:
        from protocol.transport import check_endpoint

        with refusing(ValueError, prefix="--kv-peer-address: "):
            check_endpoint(config.kv_peer_address, config.security)
    directory = _check_directory("kv_offload_dir", config.kv_offload_dir, make_private)
    # A worker that is started alone may read what others write
    if directory and isinstance(config, ServeConfig) and not os.access(directory, os.W_OK):
        raise ConfigurationError(f"--kv-offload-dir {directory}: this user cannot write it; give another directory")


def _check_directory(name: str, path: str | None, make: Callable[[Path], None]) -> Path | None:
    """Make the directory that the setting `name` gives, if it gives one, and return it. Raises: ConfigurationError"""
    if not path:
        return None
    directory = Path(os.path.expanduser(path))
    with refusing_os_errors(f"{flag(name)} {directory}: "):
        make(directory)
    return directory


def check_kv_keeper(config: ServeConfig) -> None:
    """Raises: ConfigurationError, if no keeper answers."""
    if not config.kv_keeper:
        return
    from services.kv_keeper import KeptMemory

    start = f"start one with runahead kv-keeper {config.kv_keeper}"
    with refusing_os_errors(f"--kv-keeper {config.kv_keeper}: no keeper answers (", f"); {start}"):
        KeptMemory(config.kv_keeper).connected().close()


def _check_kv_events(config: SchedulerConfig) -> None:
    """Check that KV events stay on this machine, unless they may leave it unencrypted.

    Raises: ConfigurationError
    """
    if config.kv_events_config is None or not config.kv_events_config.is_active:
        return
    from protocol.transport import check_publisher

    with refusing(ValueError, prefix="--kv-events-config: "):
        for endpoint in config.kv_events_config.endpoints:
            check_publisher(endpoint, config.security)


def free_port(host: str, port: int) -> int:
    """Return `port` if it can be bound at `host`; for 0, return a free port that no outgoing connection gets before the
    frontend binds it.

    Raises: ConfigurationError: the port is in use, or the address does not belong to this machine.
    """
    if port == 0:
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):
                return _bound(host, secrets.choice(_PORTS))
    try:
        return _bound(host, port)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {(error.strerror or str(error)).lower()}; "
            "choose another with --host or --port"
        ) from None


def _bound(host: str, port: int) -> int:
    """Bind a port for a moment and return it. Raises: OSError"""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _check_tls(config: HttpConfig) -> None:
    """Check the files of the certificate.

    Raises: ConfigurationError: a file cannot be read, is not PEM, or certificate and key do not belong together.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    name = "--ssl-certfile"
    try:
        # With an empty password, a key that needs one is refused; OpenSSL would ask for it on the terminal
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
        name = "--ssl-ca-certs"
        context.load_verify_locations(config.ssl_ca_certs) if config.ssl_ca_certs is not None else None
    except (OSError, ssl.SSLError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        files = config.ssl_ca_certs if name == "--ssl-ca-certs" else config.ssl_certfile
        key = f" with key {config.ssl_keyfile}" if config.ssl_keyfile and files == config.ssl_certfile else ""
        raise ConfigurationError(f"{name}: cannot use {files}{key}: {_plain(reason)}") from None


def _check_traces(config: FrontendConfig | ServeConfig) -> None:
    """Check that traces can be exported if they are enabled.

    Raises: ConfigurationError: the OpenTelemetry packages are not installed, the protocol is unknown, or the endpoint
    is that of another one.
    """
    if config.otlp_traces_endpoint is None:
        return
    protocol = traces_protocol()
    if protocol not in EXPORTERS:
        raise ConfigurationError(f"{TRACES_PROTOCOL} is {protocol!r}; use {' or '.join(EXPORTERS)}")
    if protocol == GRPC and urlsplit(config.otlp_traces_endpoint).path.strip("/"):
        raise ConfigurationError(
            f"--otlp-traces-endpoint {config.otlp_traces_endpoint}: {GRPC} takes no path; set "
            f"{TRACES_PROTOCOL}={HTTP}, or give the port of gRPC without a path, such as http://localhost:4317"
        )
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
    if config.is_local or config.api_key:
        return None
    return (
        f"WARNING: anyone who can reach {config.host} port {config.port} can use this server: "
        "there is no API key. Set RUNAHEAD_API_KEY (or --api-key), or use --host 127.0.0.1."
    )
