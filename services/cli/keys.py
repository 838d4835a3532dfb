"""API keys from a file, so that they appear neither in a list of processes nor in a container's description."""

from pathlib import Path
from typing import TypeVar

from services.cli.settings import ConfigurationError
from services.config import FrontendConfig

F = TypeVar("F", bound=FrontendConfig)


def with_keys(config: F) -> F:
    """Return `config` with the keys of its `api_key_file` added to its `api_key`.

    Raises:
        ConfigurationError: the file cannot be read, or contains no key, which would open the API to everyone.
    """
    if not config.api_key_file:
        return config
    try:
        lines = Path(config.api_key_file).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(f"--api-key-file: cannot read {config.api_key_file}: {reason}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigurationError(f"--api-key-file: {config.api_key_file} contains no key; write one per line")
    return config.model_copy(update={"api_key": [*config.api_key, *keys], "api_key_file": None})
