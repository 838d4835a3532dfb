"""Scheduler, worker and frontend as processes of their own, over tcp, with a proxy on each link."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from services.checkpoint import DEMO_MODEL
from services.cli.preflight import free_port
from tests.e2e.proxy import Proxies, TcpProxy
from tests.e2e.server import HttpServer, wait_until
from tests.preloaded import PreloadedProcess

LIMIT = 2.0
"""Seconds of silence after which a service is lost."""
CODE = "import sys; from services.cli import main; sys.exit(main())"
HOST = "127.0.0.1"


class SeparateServices(HttpServer):
    """Each service is found by its name in `processes`. `frontend_link` and `worker_link` lead to the scheduler."""

    def __init__(self, directory: Path, *frontend: str) -> None:
        """`frontend`: further arguments of the frontend."""
        self._directory = directory
        clients, workers, http = (free_port(HOST, 0) for _ in range(3))
        self.url = f"http://{HOST}:{http}"
        self.proxies = Proxies(clients, workers)
        self.processes: dict[str, PreloadedProcess] = {}
        silence = ("--scheduler-timeout-seconds", f"{LIMIT:g}")
        to_clients, to_workers = (f"tcp://{HOST}:{port}" for port in self.proxies.ports)
        self._start(
            *("scheduler", "--model", str(DEMO_MODEL), *silence, "--heartbeat-timeout-seconds", f"{LIMIT:g}"),
            *("--step-timeout-seconds", f"{LIMIT:g}"),
            *("--client-endpoint", f"tcp://{HOST}:{clients}", "--worker-endpoint", f"tcp://{HOST}:{workers}"),
        )
        self._start(
            *("worker", "--backend", "sim", "--sim-step-ms", "20", "--host-ip", HOST, *silence),
            *("--model", str(DEMO_MODEL), "--scheduler-endpoint", to_workers),
        )
        self._start(
            *("frontend", "--model", str(DEMO_MODEL), "--port", str(http), *silence),
            *("--scheduler-endpoint", to_clients, *frontend),
        )

    def _start(self, name: str, *arguments: str) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RUNAHEAD_")}
        with self.log(name).open("w") as log:
            self.processes[name] = PreloadedProcess(
                CODE, name, *arguments, log=log, environment=clean, is_parent=True
            )

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    @property
    def frontend_link(self) -> TcpProxy:
        return self.proxies[0]

    @property
    def worker_link(self) -> TcpProxy:
        return self.proxies[1]

    def wait_ready(self, ready: bool = True) -> None:
        status = 200 if ready else 503
        wait_until(lambda: self.get("/readyz")[0] == status, f"/readyz is {status}")

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.proxies.__exit__()


@contextlib.contextmanager
def separate_services(*frontend: str) -> Iterator[SeparateServices]:
    """Start the services, and yield them when they serve. At the end, kill them."""
    with tempfile.TemporaryDirectory(prefix="ra-") as directory:
        services = SeparateServices(Path(directory), *frontend)
        try:
            services.wait_ready()
            yield services
        finally:
            services.close()
