"""Schedulers, workers and frontends as processes of their own, over tcp, with a proxy on each link."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.checkpoint import DEMO_MODEL
from services.cli.preflight import free_port
from services.private import write_whole
from tests.e2e.proxy import Proxies, TcpProxy
from tests.e2e.server import HttpServer
from tests.e2e.streams import COMMAND
from tests.preloaded import PreloadedProcess
from tests.waiting import PATIENCE

LIMIT = 2.0
"""Seconds of silence after which frontends and workers look for another scheduler, and a worker is lost."""
SILENCE = ("--scheduler-timeout-seconds", f"{LIMIT:g}")
HOST = "127.0.0.1"


class SeparateServices(HttpServer):
    """One frontend, and engines by number: those that `list_engines` names. Processes are found by their names."""

    def __init__(self, directory: Path, engines: int, patches: Mapping[str, str]) -> None:
        self._directory, self._patches = directory, patches
        self._ports = [free_port(HOST, 0) for _ in range(2 * engines)]
        self.proxies = Proxies(*self._ports)
        self.processes: dict[str, PreloadedProcess] = {}
        self.engines_file = directory / "engines"

    def start_frontend(self, name: str, *arguments: str) -> HttpServer:
        """Start another frontend of the same engines."""
        port = free_port(HOST, 0)
        self.start(
            *(name, "frontend", "--model", str(DEMO_MODEL), "--port", str(port), *SILENCE),
            *("--engines", str(self.engines_file), *arguments),
        )
        started = HttpServer()
        started.url = f"http://{HOST}:{port}"
        return started

    def start_engine(self, engine: int, worker: tuple[str, ...]) -> None:
        clients, workers = (f"tcp://{HOST}:{port}" for port in self._ports[2 * engine : 2 * engine + 2])
        self.start(
            *(f"scheduler-{engine}", "scheduler", "--model", str(DEMO_MODEL)),
            # It goes on if a busy machine stops it for longer than `LIMIT`: nothing would start another one
            *("--scheduler-timeout-seconds", f"{PATIENCE:g}"),
            *("--heartbeat-timeout-seconds", f"{LIMIT:g}", "--step-timeout-seconds", f"{LIMIT:g}"),
            *("--client-endpoint", clients, "--worker-endpoint", workers),
        )
        self.start(
            *(f"worker-{engine}", "worker", "--backend", "sim", "--sim-step-ms", "20", "--host-ip", HOST),
            *(*SILENCE, "--model", str(DEMO_MODEL)),
            *("--scheduler-endpoint", f"tcp://{HOST}:{self.worker_link(engine).port}", *worker),
        )

    def start(self, name: str, *arguments: str) -> None:
        """Start a process of this name: `runahead ARGUMENTS`."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RUNAHEAD_")}
        code = f"{self._patches.get(name, '')}\n{COMMAND}"
        with self.log(name).open("w") as log:
            self.processes[name] = PreloadedProcess(code, *arguments, log=log, environment=clean, is_parent=True)

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def line_of(self, engine: int) -> str:
        """Return the line of an engine in the file of engines. Its number is its name."""
        return f"tcp://{HOST}:{self.frontend_link(engine).port} - {engine}\n"

    def list_engines(self, *engines: int, more: str = "") -> None:
        """`more`: further lines."""
        write_whole(self.engines_file, "".join(map(self.line_of, engines)) + more)

    def frontend_link(self, engine: int = 0) -> TcpProxy:
        """Return the link from the frontend to a scheduler."""
        return self.proxies[2 * engine]

    def worker_link(self, engine: int = 0) -> TcpProxy:
        return self.proxies[2 * engine + 1]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.proxies.__exit__()


@contextlib.contextmanager
def separate_services(
    *frontend: str,
    engines: int = 1,
    listed: int | None = None,
    worker: Mapping[int, tuple[str, ...]] | None = None,
    patches: Mapping[str, str] | None = None,
) -> Iterator[SeparateServices]:
    """Start the services, and yield them when they serve. At the end, kill them.

    Args:
        frontend: further arguments of the frontend.
        listed: number of engines that the frontend knows at first; None: all.
        worker: further arguments of the workers of some engines.
        patches: code that runs first in some processes.
    """
    listed = engines if listed is None else listed
    with tempfile.TemporaryDirectory(prefix="ra-") as directory:
        services = SeparateServices(Path(directory), engines, patches or {})
        try:
            for engine in range(engines):
                services.start_engine(engine, (worker or {}).get(engine, ()))
            services.list_engines(*range(listed))
            services.url = services.start_frontend("frontend", *frontend).url
            services.wait_readyz()
            services.wait_engines(listed)
            yield services
        finally:
            services.close()
