"""Socket on which the frontend of `serve` lets the supervisor start and stop engines.

A Unix socket in the server's private directory. Each connection carries one request and one answer, a line of JSON
each: {"do": "start", "settings": {...}}, or "status", "adopt" or "stop" with {"engine": NAME}.
The answer to the first has the name of the new engine, and the names of those that it replaces.
"""

import contextlib
import itertools
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from services.cli.engine_set import Command, EngineSet, divided, engine_names, service_names
from services.cli.model_check import check_drafter, check_sizes, check_tokenizer
from services.cli.preflight import check_model, check_policy, check_tiers
from services.cli.settings import ConfigurationError, merge
from services.cli.supervisor import Supervisor
from services.config import OF_ONE_ENGINE, OMITTED, SchedulerConfig, ServeConfig, WorkerConfig, flag

TIMEOUT = 2.0
"""Seconds that a client may take to send its line; the supervisor waits meanwhile."""
CHANGEABLE = (set(SchedulerConfig.model_fields) | set(WorkerConfig.model_fields)) - OMITTED
"""Settings that an engine may be started with."""


class EngineControl:
    """`start`: starts the services of an engine."""

    def __init__(
        self,
        path: Path,
        supervisor: Supervisor,
        engines: EngineSet,
        config: ServeConfig,
        start: Callable[[list[Command]], None],
    ) -> None:
        self._supervisor, self._engines, self._start = supervisor, engines, start
        self._config = config
        """Settings of the engines that serve."""
        self._starting: dict[str, ServeConfig] = {}
        """By engine: settings of those that have not taken the place of others yet."""
        self._services = {name: service_names(name, config) for name in engine_names(config)}
        self._names = map(str, itertools.count(config.data_parallel_size))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        supervisor.watch(self._listener, self._on_client)

    def close(self) -> None:
        self._listener.close()

    def _on_client(self) -> None:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # the client has left, or sent no JSON
            client, _ = self._listener.accept()
            with client, client.makefile("rw") as lines:
                client.settimeout(TIMEOUT)
                try:
                    answer = self._answer(json.loads(lines.readline()))
                except (ConfigurationError, OSError) as error:
                    answer = {"error": str(error)}
                lines.write(json.dumps(answer) + "\n")

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Raises: ConfigurationError, OSError"""
        match request:
            case {"do": "start", "settings": dict(settings)}:
                return {"engine": self._start_engine(settings), "replaces": self._engines.names[:-1]}
            case {"do": "status", "engine": str(name)}:
                ended = self._supervisor.end_of(self._services.get(name, [name]))
                return {"error": ended} if ended else {}
            case {"do": "stop", "engine": str(name)}:
                self._engines.hide(name)
                self._starting.pop(name, None)
                self._supervisor.retire(self._services.pop(name, []))
                return {}
            case {"do": "adopt", "engine": str(name)}:
                self._supervisor.adopt(self._services.get(name, []))
                self._config = self._starting.pop(name, self._config)
                return {}
        raise ConfigurationError("unknown request to the supervisor")

    def _start_engine(self, settings: Mapping[str, object]) -> str:
        """Check the settings and the memory that they need, and start an engine beside the others. Return its name.

        Raises: ConfigurationError, OSError
        """
        values = self._config.model_dump(exclude_unset=True) | dict(settings)
        config = merge(ServeConfig, values, environ={}).config
        others = sorted(settings.keys() - CHANGEABLE)
        if wrong := [name for name in others if getattr(config, name) != getattr(self._config, name)]:
            raise ConfigurationError(f"{flag(wrong[0])} is no setting of an engine; stop the server to change it")
        if wrong := [name for name in OF_ONE_ENGINE if getattr(config, name)]:
            raise ConfigurationError(f"{flag(wrong[0])}: two engines cannot share it, so no other one is started")
        check_model(config.model)
        check_sizes(config.model_copy(update={"data_parallel_size": 1}))
        check_tokenizer(config)
        check_drafter(config)
        check_policy(config)
        check_tiers(config)
        name = next(self._names)
        commands = self._engines.engine(name, divided(config))
        self._start(commands)
        self._engines.show(name)
        self._starting[name], self._services[name] = config, [command.name for command in commands]
        return name
