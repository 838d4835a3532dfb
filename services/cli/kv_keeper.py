"""`runahead kv-keeper PATH`: keep the KV memory of workers beyond the end of `serve` (services/kv_keeper.py)."""

import os
from pathlib import Path

from services.cli import logs
from services.cli.settings import ConfigurationError
from services.config.commands import KeeperConfig
from services.kv_keeper import Keeper
from services.process import stop_signals


def kv_keeper(config: KeeperConfig) -> int:
    """Serve workers until a signal. Return the exit status.

    Raises: ConfigurationError
    """
    logs.configure("info", "text")
    with stop_signals() as stop:
        try:
            keeper = Keeper(Path(os.path.expanduser(config.path)), config.recovery_timeout_seconds)
        except AttributeError:
            raise ConfigurationError("kv-keeper needs Linux: this system has no shared memory without a name") from None
        except OSError as error:
            raise ConfigurationError(f"no socket can be made at {config.path}: {error.strerror or error}") from None
        print(f"Keeping KV memory for workers with --kv-keeper {config.path}", flush=True)
        keeper.run(stop)
    return 0
