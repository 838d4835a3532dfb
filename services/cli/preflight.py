"""What can be known to be wrong before anything is started."""

import ipaddress
import socket
from pathlib import Path

from services.checkpoint import CheckpointError, resolve
from services.cli.settings import ConfigurationError
from services.config import ServeConfig


def check_model(model: str) -> None:
    """Looks for a model directory. What is in it is for those who read it to judge, and so are names on the hub.

    Raises:
        ConfigurationError: there is none; the text says what to do.
    """
    if not _is_hub_name(model):
        try:
            resolve(model)
        except CheckpointError as error:
            raise ConfigurationError(str(error)) from None


def _is_hub_name(model: str) -> bool:
    path = Path(model).expanduser()
    is_path = not model or path.exists() or path.is_absolute() or model[0] in ".~" or model.count("/") > 1
    return not is_path


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
