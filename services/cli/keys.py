"""API keys that stand in a file, where neither a process list nor a container's description shows them."""

from pathlib import Path
from typing import TypeVar

from services.cli.settings import ConfigurationError
from services.config import FrontendConfig

F = TypeVar("F", bound=FrontendConfig)


def with_keys(config: F) -> F:
    """`config` with the keys of its `api_key_file` among its `api_key`.

    Raises:
        ConfigurationError: the file cannot be read, or holds no key: that must not open the API to everybody.
    """
    if not config.api_key_file:
        return config
    try:
        lines = Path(config.api_key_file).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigurationError(f"--api-key-file: cannot read {config.api_key_file}: {why}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigurationError(f"--api-key-file: {config.api_key_file} holds no key; write one per line")
    return config.model_copy(update={"api_key": [*config.api_key, *keys], "api_key_file": None})
