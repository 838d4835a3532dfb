"""A Ray cluster on hosts of the test, and an application on it."""

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import psutil

from services.checkpoint import DEMO_MODEL
from tests.e2e.server import HttpServer
from tests.ray.hosts import Host

BIN = Path(".venv-ray/bin").absolute()
"""Made by `make setup-ray`."""
GCS_PORT, PROXY_PORT, OWN_PORT = 6379, 8000, 8001
CPUS = 4
TOKEN = secrets.token_hex(32)
CONTROLLER, SCHEDULER, RANK, ENGINE, FRONTEND = (
    "ServeController",
    "ray::SchedulerActor",
    "ray::RankActor",
    "default:Engine",
    "default:Frontend",
)
"""Parts of the titles of Ray's processes."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of Ray's processes. A lost node is noticed within ten seconds, not a minute."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RUNAHEAD_"))}
    return kept | {
        "TMPDIR": "/tmp",  # each host has its own
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # as docs/ray.md recommends, and whatever tokens this user has
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "2000",
        "RAY_health_check_failure_threshold": "4",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_raylet_start_wait_time_s": "500",  # a busy machine needs more than 60, and its agents more than 30
        "RAY_agent_register_timeout_ms": "500000",
        "PYTHONPATH": os.getcwd(),
        **more,
    }


class HttpFrontend(HttpServer):
    """A frontend's own port, or Serve's proxy, on a host."""

    def __init__(self, host: Host, port: int) -> None:
        self.url = f"http://{host.address}:{port}"


class Cluster:
    def __init__(self, hosts: list[Host], **variables: str) -> None:
        self.hosts = hosts
        self.address = f"{hosts[0].address}:{GCS_PORT}"
        self.environment = environment(**variables)

    def start(self) -> None:
        """Start Ray on every host, and Serve with a proxy on each that other hosts reach."""
        for host in self.hosts:
            self.start_node(host)
        command = [str(BIN / "serve"), "start", "--address", self.address, "--http-host", "0.0.0.0"]
        self.hosts[0].run([*command, "--proxy-location", "EveryNode"], self.environment)

    def start_node(self, host: Host, **variables: str) -> None:
        head = ["--head", "--port", str(GCS_PORT), "--include-dashboard=false"]
        place = head if host is self.hosts[0] else ["--address", self.address]
        host.run(
            [
                str(BIN / "ray"), "start", *place, "--node-ip-address", host.address, "--num-cpus", str(CPUS),
                "--disable-usage-stats", "--object-store-memory", str(80 << 20),
            ],
            self.environment | variables,
        )  # fmt: skip

    def serve(self, *arguments: str, model: str = str(DEMO_MODEL)) -> str:
        """Deploy the application, wait until it runs, and return the output of the command."""
        words = [f"model={model}", "host=0.0.0.0", "kv_cache_memory_bytes=64M", "enable_admin_routes=true", *arguments]
        command = [str(BIN / "serve"), "run", "--address", self.address, "--non-blocking", "services.ray:app"]
        return self.hosts[0].run([*command, *words], self.environment, timeout=300)

    def runahead(self, *arguments: str) -> str:
        """Run the command on the head, and return its output."""
        return self.hosts[0].run([str(BIN / "runahead"), *arguments], self.environment)

    def python(self, code: str) -> str:
        """Run code as a driver on the head, and return its output."""
        options = "namespace='serve', log_to_driver=False, logging_level='error'"
        begin = f"import ray; ray.init({self.address!r}, {options})\n"
        return self.hosts[0].run([str(BIN / "python"), "-c", begin + code], self.environment)

    def status(self) -> dict[str, str]:
        """Return the status of the application and of each deployment, and the message of the first."""
        code = (
            "import json; from ray import serve\n"
            "a = serve.status().applications.get('default')\n"
            "print('STATUS', json.dumps({} if a is None else {'app': a.status, 'message': a.message, "
            "**{n: d.status + ' ' + str(d.replica_states) for n, d in a.deployments.items()}}))"
        )
        line = next(line for line in self.python(code).splitlines() if line.startswith("STATUS "))
        return dict(json.loads(line.removeprefix("STATUS ")))

    def processes(self, title: str) -> list[psutil.Process]:
        return [process for host in self.hosts for process in host.processes(title)]

    def frontends(self) -> list[HttpFrontend]:
        return [HttpFrontend(host, OWN_PORT) for host in self.hosts if host.processes(FRONTEND)]


def engines(frontend: HttpFrontend) -> dict[str, str]:
    """Return the state of each engine of a frontend."""
    _, body = frontend.get("/engines")
    return {engine["name"]: engine["state"] for engine in json.loads(body or '{"engines": []}')["engines"]}


def serves(frontend: HttpFrontend, count: int) -> Callable[[], bool]:
    """Return a condition: so many engines serve, and there is no other."""
    return lambda: [*engines(frontend).values()] == ["ready"] * count
