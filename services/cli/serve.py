"""`runahead serve`: frontend, scheduler and worker on this machine, over sockets in a private directory."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from services.cli.display import display
from services.cli.keys import with_keys
from services.cli.preflight import check_model, free_port, warning
from services.cli.readiness import Probe, Readiness
from services.cli.settings import PREFIX
from services.cli.start import SERVICES
from services.cli.supervisor import Supervisor
from services.config import ServeConfig
from services.private import private_directory, short_base

PRIVATE = "runahead-serve-"
"""How the name of the directory begins that holds a server's sockets and configurations."""
POLL_INTERVAL = 0.1
"""Seconds between two looks at a frontend that is not ready."""
FINAL = (3, 4)
"""Exit statuses of a worker that would end in the same way again: its model cannot be served, or the scheduler refused
it. One that lost its scheduler may come back: if the scheduler has ended, that ends all."""


def serve(config: ServeConfig) -> int:
    """Serves until a signal or a failure. Returns the exit status: 0 after an orderly stop.

    Raises:
        ConfigurationError: what was asked for cannot be served.
    """
    started = time.monotonic()
    check_model(config.model)
    config = with_keys(config)
    config = config.model_copy(update={"port": free_port(config.host, config.port)})
    screen = display()
    if (danger := warning(config)) is not None:
        screen.line(danger)
    width = max(map(len, _names(config)))
    supervisor = Supervisor(lambda name, line: screen.line(f"{name:{width}} | {line}"))
    probe = Probe(config.host, config.port, config.api_key[0] if config.api_key else "")
    is_ready = False

    def tick() -> float | None:
        nonlocal is_ready
        if is_ready:
            return None
        readiness = probe.readiness() or Readiness(False, "starting", 0.0)
        if not readiness.ready:
            screen.loading(readiness)
            return POLL_INTERVAL
        is_ready = True
        screen.done()
        print(_welcome(probe, bool(config.api_key), time.monotonic() - started), flush=True)
        return None

    try:
        with supervisor.signals(), private_directory(short_base(PRIVATE, "clients"), PRIVATE) as directory:
            for name, arguments in _commands(config, directory):
                is_worker = name.startswith("worker")
                supervisor.start(name, arguments, _environment(), comes_back=is_worker, final=FINAL)
            status = supervisor.wait(tick)
    finally:
        screen.done()
    if supervisor.failure is not None:
        screen.line(f"runahead: {supervisor.failure.how_it_ended()}")
    return status


def _commands(config: ServeConfig, directory: Path) -> Iterator[tuple[str, list[str]]]:
    """By service, what to run. Configurations travel in files that only this user can read, never in arguments."""
    clients, workers = f"ipc://{directory}/clients", f"ipc://{directory}/workers"
    endpoints = {
        "frontend": {"scheduler_endpoint": clients},
        "scheduler": {"client_endpoint": clients, "worker_endpoint": workers},
        "worker": {"scheduler_endpoint": workers},
    }
    for name in _names(config):
        service = name.partition("-")[0]
        model, file = SERVICES[service], directory / f"{name}.json"
        file.write_text(model.model_validate(config.of(model) | endpoints[service]).model_dump_json())
        # -P: a folder named like one of our packages in the current directory is not what we run
        command = [sys.executable, "-P", "-m", "services.cli.child", service, str(file), str(os.getpid())]
        yield name, command


def _names(config: ServeConfig) -> list[str]:
    """The services to start, in the order in which they are stopped."""
    frontend, scheduler, worker = SERVICES
    workers = config.num_workers
    return [frontend, scheduler, *([worker] if workers == 1 else [f"{worker}-{i}" for i in range(workers)])]


def _environment() -> dict[str, str]:
    """Ours, without what the configuration files already say."""
    settings = {PREFIX + name.upper() for name in ServeConfig.model_fields}
    return {name: value for name, value in os.environ.items() if name not in settings}


def _welcome(probe: Probe, needs_key: bool, seconds: float) -> str:
    """One line: what is served, where, since when, and what to try."""
    model = probe.model()
    key = ' -H "Authorization: Bearer $RUNAHEAD_API_KEY"' if needs_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    example = f"curl {probe.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"
    return f"Serving {model} at {probe.url}/v1 after {seconds:.1f} s. Try: {example}"
