"""`runahead kv-keeper PATH`: keep the KV memory of workers beyond the end of `serve` (services/kv_keeper.py)."""

import os
from pathlib import Path

from services.cli import logs
from services.cli.settings import ConfigurationError
from services.kv_keeper import Keeper
from services.process import stop_signals


def run_keeper(path: Path, seconds: float) -> int:
    """Serve workers until a signal. Return the exit status.

    Raises: ConfigurationError
    """
    logs.configure("info", "text")
    with stop_signals() as stop:
        try:
            keeper = Keeper(Path(os.path.expanduser(path)), seconds)
        except AttributeError:
            raise ConfigurationError("kv-keeper needs Linux: this system has no shared memory without a name") from None
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror or error}") from None
        print(f"Keeping KV memory for workers with --kv-keeper {path}", flush=True)
        keeper.run(stop)
    return 0
