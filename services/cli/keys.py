"""API keys from a file, so that they appear neither in a list of processes nor in a container's description."""

from typing import TypeVar

from services.cli.settings import ConfigurationError, refusing, text_of_file
from services.config import FrontendConfig

F = TypeVar("F", bound=FrontendConfig)


def with_keys(config: F) -> F:
    """Return `config` with the keys of its `api_key_file` added to its `api_key`.

    Raises:
        ConfigurationError: the file cannot be read, or contains no key, which would open the API to everyone, or one
            that `check_keys` refuses.
    """
    if not config.api_key_file:
        return config
    lines = text_of_file("api_key_file", config.api_key_file).splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise ConfigurationError(f"--api-key-file: {config.api_key_file} contains no key; write one per line")
    with refusing(ValueError, prefix="--api-key-file: "):
        return config.model_copy(update={"api_key": [*config.api_key, *config.check_keys(keys)], "api_key_file": None})
