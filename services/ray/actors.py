"""Actors of an engine: its scheduler and its ranks. Each runs its service as a child process.

Every second, a peer of a scheduler calls `join` with its public key and gets the address in return. So it finds a
scheduler that Ray has started again, perhaps on another node, and that scheduler gets the keys of its peers.
"""

import contextlib
import socket
import threading
import time
import traceback
import zlib
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from protocol.security import SERVER
from services import release
from services.checkpoint import CheckpointError, resolve
from services.config import SERVICES, RayConfig
from services.ray.child import ServiceChild
from services.ray.keys import KeyDirectory, key_directory
from services.ray.resources import engines_of_node

JOIN_INTERVAL = 1.0
"""Seconds between two calls of `join`."""
JOIN_TIMEOUT = 5.0
FIRST_PORT, NUM_PORTS = 20_000, 10_000
"""Range of the schedulers' ports: neither of Ray's workers nor of the system's own choice."""


@dataclass(frozen=True)
class SchedulerAddress:
    """Endpoints of a scheduler, and its key."""

    clients: str
    workers: str
    public_key: str


def check_version(version: str) -> None:
    """Raises: RuntimeError, if this node has another version of Runahead"""
    if version != (own := release.version()):
        raise RuntimeError(
            f"node {node_address()} has Runahead {own}, and the application {version}; install one version on all nodes"
        )


def node_address() -> str:
    return str(ray.util.get_node_ip_address())


class ServiceActor:
    """`version`: version of Runahead of the application."""

    def __init__(self, service: str, version: str) -> None:
        check_version(version)
        self._stack = contextlib.ExitStack()
        self._keys: KeyDirectory = self._stack.enter_context(key_directory(service))
        self._service = service
        self._child: ServiceChild | None = None
        self._error = ""

    def failure(self) -> str:
        """Return how the service has ended for good, or ""."""
        text = self._error or ("" if self._child is None else self._child.failure)
        return f"node {node_address()}: {text}" if text else ""

    def _start(self, config: RayConfig, changes: dict[str, object]) -> None:
        model = SERVICES[self._service]
        settings = config.service_settings(model) | changes | {"transport_keys": str(self._keys.path)}
        self._child = ServiceChild(self._service, model.model_validate(settings), self._keys.path)


class SchedulerActor(ServiceActor):
    """`name`: of the engine. Raises: RuntimeError, if this node does not have the model"""

    def __init__(self, name: str, settings: dict[str, Any], version: str) -> None:
        super().__init__(SERVER, version)
        config, host = RayConfig(**settings), node_address()
        try:
            resolve(config.tokenizer or config.model, config.revision)
        except CheckpointError as error:  # the service itself would serve everything but grammars
            raise RuntimeError(f"node {host}: scheduler: {error}") from None
        shown = f"[{host}]" if ":" in host else host
        clients, workers = (f"tcp://{shown}:{port}" for port in _ports(host, name))
        self._address = SchedulerAddress(clients, workers, self._keys.public_key)
        self._start(config, {"client_endpoint": clients, "worker_endpoint": workers})

    def join(self, role: str, public_key: str) -> SchedulerAddress:
        """Let a peer connect. Return where to. Raises: ValueError"""
        if role not in SERVICES or role == SERVER:
            raise ValueError(f"{role!r} is no role of a peer")
        self._keys.admit(role, public_key)
        return self._address

    def drain(self) -> None:
        """Let the streams move, or end if no other engine takes them, and wait for the end of the scheduler."""
        if self._child is not None:
            self._child.stop(None)


class RankActor(ServiceActor):
    """`scheduler`: name of its actor. A handle is an object, which may be lost when Ray starts this actor again."""

    def __init__(self, scheduler: str, settings: dict[str, Any], version: str) -> None:
        super().__init__("worker", version)
        self._scheduler_name, self._config = scheduler, RayConfig(**settings)
        self._endpoint = ""
        threading.Thread(target=self._follow, name="scheduler", daemon=True).start()

    def _follow(self) -> None:
        """Join the scheduler, and start the worker, again if the scheduler is on another node."""
        scheduler = None
        while not self._error:
            address = None
            with contextlib.suppress(RayError, ValueError):  # the last: there is no such actor yet
                scheduler = scheduler or ray.get_actor(self._scheduler_name)
                joining = scheduler.join.remote("worker", self._keys.public_key)
                address = ray.get(joining, timeout=JOIN_TIMEOUT)
            try:
                if address is not None:
                    self._on_address(address)
            except Exception as error:
                traceback.print_exc()
                self._error = f"the worker cannot be started: {error}"
            time.sleep(JOIN_INTERVAL)

    def _on_address(self, address: SchedulerAddress) -> None:
        self._keys.admit(SERVER, address.public_key)
        if address.workers == self._endpoint:
            return
        if self._child is not None:
            self._child.stop(None)
        self._endpoint = address.workers
        changes: dict[str, object] = {"scheduler_endpoint": address.workers, "host_ip": node_address()}
        if self._config.backend == "native":
            changes["engines_here"] = self._engines_here()
        self._start(self._config, changes)

    def _engines_here(self) -> int:
        """Return the number of engines that may share this node's memory."""
        own = ray.get_runtime_context().get_node_id()
        cpus = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == own)
        return engines_of_node(self._config, cpus)


def _ports(host: str, name: str) -> tuple[int, int]:
    """Return two free ports, which are the same when the scheduler of this engine is started again."""
    found, first = list[int](), zlib.crc32(name.encode())
    for number in range(NUM_PORTS):
        port = FIRST_PORT + (first + number) % NUM_PORTS
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.suppress(OSError), socket.create_server((host, port), family=family):
            found.append(port)
        if len(found) == 2:
            return found[0], found[1]
    raise RuntimeError(f"node {host} has no free port from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}")
