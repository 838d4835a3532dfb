"""Engines of one server on this machine: the commands of their services, and the file that lists them for frontends.

Each engine is a scheduler with its workers, over sockets of its own in the server's private directory. The frontend
reads the file again when it changes, so engines may be added and removed while it serves.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.config import SERVICES, ServeConfig
from services.private import write_whole
from services.worker import machine

LOOPBACK = "tcp://127.0.0.1:0"
CONTROL = "control"
"""Name of the supervisor's socket in the private directory."""


@dataclass(frozen=True)
class Command:
    name: str
    arguments: list[str]

    @property
    def service(self) -> str:
        return self.name.partition("-")[0]


def engine_names(config: ServeConfig) -> list[str]:
    """Return the names of the engines that a server begins with."""
    return [str(index) for index in range(config.data_parallel_size)]


def service_names(engine: str, config: ServeConfig) -> list[str]:
    """Return the names of an engine's services: the scheduler first. Those of a server with one engine carry no number
    of it. No other engine of the server ever has the same."""
    alone = config.data_parallel_size == 1
    number = "" if alone and engine == "0" else f"-{engine}"
    ranks = [f"-{rank}" for rank in range(config.num_workers)]
    if len(ranks) == 1 and not (alone and number):  # worker-1 may be the second rank of the first engine
        ranks = [""]
    return [f"scheduler{number}", *(f"worker{number}{rank}" for rank in ranks)]


def divided(config: ServeConfig) -> ServeConfig:
    """Return the settings of one of several engines: cores, and memory for KV caches, are divided among them."""
    count, changes = config.data_parallel_size, dict[str, object]()
    if count > 1 and config.backend != "sim":
        threads = config.threads or max(1, machine.cores() // (count * config.num_workers))
        changes |= {"threads": threads, "engines_here": count}
    return config.model_copy(update=changes)


class EngineSet:
    def __init__(self, config: ServeConfig, directory: Path) -> None:
        self._config, self.directory = config, directory
        self._file = directory / "engines"
        self._listed: dict[str, str] = {}
        """Endpoint by name."""

    def frontend(self) -> Command:
        """Return the command of the frontend. Raises: OSError"""
        control = str(self.directory / CONTROL)
        return self._command("frontend", self._config, {"engines": str(self._file), "control_socket": control})

    def engine(self, name: str, config: ServeConfig) -> list[Command]:
        """Return the commands of an engine's services, the scheduler first. Raises: OSError"""
        clients, workers = self._endpoint("clients", name), self._endpoint("workers", name)
        scheduler, *ranks = service_names(name, config)
        scheduling = {"worker_endpoint": workers} | ({} if config.headless else {"client_endpoint": clients})
        working = {"scheduler_endpoint": workers, "transport_keys": None}
        if config.prefill_engines:
            index = int(name)
            role = "prefill" if index < config.prefill_engines else "decode"
            scheduling["role"] = role if index < config.data_parallel_size else "both"  # one of a replan
            working |= {"kv_peer_address": config.kv_peer_address or LOOPBACK}
        return [self._command(scheduler, config, scheduling), *(self._command(rank, config, working) for rank in ranks)]

    def _endpoint(self, kind: str, name: str) -> str:
        return f"ipc://{self.directory}/{kind}" + ("" if name == "0" else f"-{name}")

    def show(self, name: str) -> None:
        """List an engine for the frontend. Raises: OSError"""
        self._listed[name] = self._endpoint("clients", name)
        self._write()

    def hide(self, name: str) -> None:
        """List an engine no longer: its streams move to others. Raises: OSError"""
        self._listed.pop(name, None)
        self._write()

    @property
    def names(self) -> list[str]:
        """Engines that are listed."""
        return list(self._listed)

    def _write(self) -> None:
        write_whole(self._file, "".join(f"{endpoint} - {name}\n" for name, endpoint in self._listed.items()))

    def _command(self, name: str, config: ServeConfig, endpoints: Mapping[str, object]) -> Command:
        service = name.partition("-")[0]
        settings = {**config.service_settings(SERVICES[service]), **endpoints}
        return Command(name, child_command(service, settings, self.directory / f"{name}.json"))


def child_command(service: str, settings: Mapping[str, object], file: Path) -> list[str]:
    """Write the configuration of a service to a file that only this user can read, and return the command that runs the
    service as a child of this process. Raises: OSError"""
    file.touch(mode=0o600)
    file.write_text(SERVICES[service].model_validate(settings).model_dump_json(exclude_unset=True))
    # -P: do not import from the current directory, which may hold a folder with the name of our packages
    return [sys.executable, "-P", "-m", "services.cli.child", service, str(file), str(os.getpid())]
