"""`runahead serve`: frontend, scheduler and worker on this machine, over sockets in a private directory."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from services.checkpoint.gguf import forget_headers
from services.cli import preflight
from services.cli.child_process import RESTART_WINDOW
from services.cli.control import EngineControl
from services.cli.display import display, write_line
from services.cli.engine_set import CONTROL, Command, EngineSet, divided, engine_names
from services.cli.logs import json_line
from services.cli.model_check import check_drafter, check_sizes, check_tokenizer
from services.cli.readiness import FrontendProbe, LoadingState
from services.cli.settings import PREFIX, VLLM_API_KEY, refusing_os_errors
from services.cli.supervisor import Supervisor
from services.config import ServeConfig
from services.kv_keeper import keeping
from services.private import private_directory, short_base
from services.process import end_start_up

DIRECTORY_PREFIX = "runahead-serve-"
"""Prefix of the private directory with the sockets and configurations of a server."""
POLL_INTERVAL = 0.1
"""Seconds between two requests to a frontend that is not ready."""
FINAL = {"frontend": (1, 3, 4), "scheduler": (1, 5), "worker": (3, 4)}
"""Exit statuses of the services after which they are not restarted: the configuration cannot be used, or the port is
taken (1); the model cannot be served (3); the scheduler refused the service (4), or gave up its workers (5)."""


def serve(config: ServeConfig, on_ready: Callable[[Callable[[], None]], None] | None = None) -> int:
    """Serve until a signal or a failure. Return the exit status: 0 after an orderly stop.

    Args:
        on_ready: called once requests are served, instead of a line about the address; its argument stops the server
            and may be called from another thread.

    Raises: ConfigurationError: the model or the address cannot be used.
    """
    started = time.monotonic()
    config = _checked(config)
    screen = display(config.log_format)
    if (text := preflight.warning(config)) is not None:
        screen.line(text)

    def show(name: str, line: str) -> None:
        width = max((len(child.name) for child in supervisor.children), default=0)
        screen.line(json_line(name, line) if config.log_format == "json" else f"{name:{width}} | {line}")

    supervisor = Supervisor(show, first_needs_others=not config.headless)
    probe = FrontendProbe(config)
    is_ready = False

    def loading() -> LoadingState:
        phase = supervisor.phase()
        if config.headless:
            return LoadingState(not phase, phase, 0.0)
        state = probe.loading_state() or LoadingState(False, "starting", 0.0)
        return replace(state, phase=phase) if phase and not state.progress else state

    def tick() -> float | None:
        nonlocal is_ready
        if is_ready:
            return None
        if not (state := loading()).ready:
            screen.loading(state)
            return POLL_INTERVAL
        is_ready = True
        forget_headers()
        end_start_up()
        screen.done()
        if on_ready is not None:
            on_ready(supervisor.stop)
        elif config.headless:
            screen.line(f"The engine takes frontends at {config.client_endpoint} while its workers load.")
        else:
            write_line(_welcome(probe, config, time.monotonic() - started), sys.stdout)
        return None

    try:
        with supervisor.signals(), _runtime(config) as (engines, commands), contextlib.ExitStack() as stack:
            environment = child_environment() | stack.enter_context(keeping(engines.directory, RESTART_WINDOW))

            def start(commands: list[Command], is_trial: bool = False) -> None:
                # The worker first: it takes longest to start.
                for command in reversed(commands) if not is_trial else commands:
                    final = FINAL[command.service]
                    supervisor.start(command.name, command.arguments, environment, final, is_trial)

            start(commands)
            path = engines.directory / CONTROL
            control = EngineControl(path, supervisor, engines, config, lambda more: start(more, is_trial=True))
            stack.callback(control.close)
            status = supervisor.wait(tick)
    finally:
        screen.done()
    if supervisor.failure is not None:
        screen.line(f"runahead: {supervisor.failure.describe_end()}")
    return status


def _checked(config: ServeConfig) -> ServeConfig:
    """Return the configuration with its keys and its port. Raises: ConfigurationError"""
    preflight.check_model(config.model)
    config = preflight.with_keys(config)
    preflight.check(config)
    check_sizes(config)
    check_tokenizer(config)
    check_drafter(config)
    preflight.check_kv_keeper(config)
    if config.uds is None and not config.headless:
        config = config.model_copy(update={"port": preflight.free_port(config.host, config.port)})
    return config


@contextlib.contextmanager
def _runtime(config: ServeConfig) -> Iterator[tuple[EngineSet, list[Command]]]:
    """Make the directory with the sockets and configurations of the server, and yield its engines, and the commands of
    its services in the order in which they are stopped.

    Raises: ConfigurationError, if the directory cannot be made or written
    """
    base = short_base(DIRECTORY_PREFIX, "clients")
    with contextlib.ExitStack() as stack:
        remedy = "set XDG_RUNTIME_DIR to a directory that can be written and has room"
        with refusing_os_errors(f"{base} cannot hold the sockets of the services: ", f"; {remedy}"):
            directory = stack.enter_context(private_directory(base, DIRECTORY_PREFIX))
            engines = EngineSet(config, directory)
            commands = [] if config.headless else [engines.frontend()]
            for name in engine_names(config):
                commands += engines.engine(name, divided(config))
                engines.show(name)
        yield engines, commands


def child_environment() -> dict[str, str]:
    """Return this process's environment without the settings, which the configuration files contain."""
    settings = {VLLM_API_KEY, *(PREFIX + name.upper() for name in ServeConfig.model_fields)}
    return {name: value for name, value in os.environ.items() if name not in settings}


_EXAMPLES = {
    "generate": ("/v1/chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'),
    "embed": ("/v1/embeddings", '"input": "Hello"'),
    "classify": ("/classify", '"input": "Hello"'),
}
"""Path and fields of a first request, by task."""


def _welcome(probe: FrontendProbe, config: ServeConfig, seconds: float) -> str:
    """Return one line with the model, its URL, the start-up time, the page and an example request."""
    info = probe.model_info()
    model = info.get("model_id", "")
    key = ' -H "Authorization: Bearer $RUNAHEAD_API_KEY"' if config.api_key else ""
    page = f" Page: {probe.url}/ ." if config.ui and config.uds is None else ""
    path, content = _EXAMPLES.get(str(info.get("task")), ("/pooling", '"input": "Hello"'))
    body = f'{{"model": "{model}", {content}}}'
    example = f"{probe.curl()}{path} -H 'Content-Type: application/json'{key} -d '{body}'"
    return f"Serving {model} at {probe.url}/v1 after {seconds:.1f} s.{page} Try: {example}"
