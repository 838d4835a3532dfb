"""Runs one service in this process. Only the code of that service is imported."""

import logging
import os
import signal
import threading
import traceback
from collections.abc import Callable

from protocol.transport import HandshakeRefused, HandshakeTimeout, check_endpoint
from services.checkpoint import CheckpointError
from services.cli import logs, preflight
from services.cli.settings import ConfigurationError, refusing
from services.config import ENDPOINTS, FrontendConfig, SchedulerConfig, ServiceConfig, WorkerConfig, flag
from services.process import collection_paused

log = logging.getLogger("runahead")

EXIT_BUG = 70
"""Exit status after an error that the user cannot correct; it may not occur again after a restart."""


def start(config: ServiceConfig) -> int:
    """Run the service that `config` describes until it ends. Return its exit status.

    An error that the user can correct is logged as one line. Any other error is a bug and is logged with its traceback,
    also on another thread: without that thread the process would serve on, and requests would wait for it.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # a container's first process ignores one that has no handler
        signal.signal(number, lambda *_: os._exit(0))
    logs.configure(config.log_level, config.log_format)
    threading.excepthook = _end_process
    try:
        check_endpoints(config)
        with refusing(OSError, prefix="--transport-keys: "):
            config.security.check(is_server=isinstance(config, SchedulerConfig))
        with collection_paused():
            preflight.check(config)
            run = _entry_point(config)
        return run()
    except (CheckpointError, ConfigurationError, HandshakeRefused, HandshakeTimeout, OSError) as error:
        log.error("%s", " ".join(str(error).split()))
    except Exception as error:
        log.exception("%s: %s", type(error).__name__, error)
        return EXIT_BUG
    finally:  # the process is ending, so a late signal or error must not interrupt it
        threading.excepthook = threading.__excepthook__
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return 1


def _end_process(error: threading.ExceptHookArgs) -> None:
    """End the process for an error of one of its own threads. Those that a library has started end alone."""
    modules = (frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.exc_traceback))
    target = next((module for module in modules if module != "threading"), "")
    if not target.startswith(("services.", "protocol.")):
        threading.__excepthook__(error)
        return
    log.critical("%s: %s", error.exc_type.__name__, error.exc_value, exc_info=error.exc_value)
    os._exit(EXIT_BUG)


def _entry_point(config: ServiceConfig) -> Callable[[], int]:
    match config:
        case FrontendConfig():
            from services.frontend.service import run as run_frontend

            with_key_file = preflight.with_keys(config)
            return lambda: run_frontend(with_key_file)
        case SchedulerConfig():
            from services.scheduler.service import run as run_scheduler

            return lambda: run_scheduler(config)
        case WorkerConfig():
            from services.worker.service import run as run_worker

            return lambda: run_worker(config)
    raise TypeError(f"{type(config).__name__} belongs to no service")


def check_endpoints(config: ServiceConfig) -> None:
    """Raises: ConfigurationError, if an endpoint is invalid."""
    for name in ENDPOINTS & set(type(config).model_fields):
        if isinstance(config, FrontendConfig) and config.engines is not None:
            continue  # checked line by line
        given = getattr(config, name)
        for endpoint in given if isinstance(given, list) else [given]:
            with refusing(ValueError, prefix=f"{flag(name)}: "):
                check_endpoint(endpoint, config.security)
