"""What can be known to be wrong before anything is started."""

import ipaddress
import json
import socket
from collections.abc import Iterator
from pathlib import Path

from services.checkpoint import CheckpointError, resolve
from services.cli.settings import ConfigurationError
from services.config import ServeConfig


def check_model(config: ServeConfig) -> None:
    """Looks at a model directory; names on the hub are left to those who download them.

    Raises:
        ConfigurationError: something is missing or unreadable; the text says what to do.
    """
    if config.model and _is_hub_name(config.model):
        return
    try:
        directory = resolve(config.model, config.revision)
    except CheckpointError as error:
        raise ConfigurationError(str(error)) from None
    for problem in _problems(directory, needs_weights=config.backend == "native"):
        raise ConfigurationError(
            f"model directory {directory}: {problem}; give a complete checkpoint in Hugging Face format"
        )
    tokenizer = directory / "tokenizer.json"
    if config.tokenizer is None and not tokenizer.is_file():
        raise ConfigurationError(f"model directory {directory}: no tokenizer.json; name one with --tokenizer")


def _is_hub_name(model: str) -> bool:
    path = Path(model).expanduser()
    return not path.exists() and not path.is_absolute() and model[:1] not in ".~" and model.count("/") <= 1


def _problems(directory: Path, needs_weights: bool) -> Iterator[str]:
    try:
        content = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        yield "no config.json"
    except (OSError, ValueError) as error:
        yield f"config.json cannot be read ({' '.join(str(error).split())})"
    else:
        if not isinstance(content, dict):
            yield "config.json is not a JSON object"
    if needs_weights and not any(directory.glob("*.safetensors")):
        yield "no *.safetensors file"


def free_port(host: str, port: int) -> int:
    """`port` if it can be bound at `host`, for 0 one that is free now.

    Raises:
        ConfigurationError: it is taken, or the address is none of this machine's.
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


def warning(config: ServeConfig) -> str | None:
    """What is dangerous about an allowed configuration."""
    try:
        is_private = ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        is_private = config.host == "localhost"
    if is_private or config.api_key:
        return None
    return (
        f"WARNING: anyone who can reach {config.host} port {config.port} can use this server: "
        "there is no API key. Set RUNAHEAD_API_KEY (or --api-key), or use --host 127.0.0.1."
    )
