"""`runahead serve` as a process of its own, and checks that nothing is left of it afterwards."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING

import psutil

from services.checkpoint import DEMO_MODEL
from tests.e2e import forked as forked_serve
from tests.metrics import samples
from tests.preloaded import OUTPUT, PreloadedProcess
from tests.waiting import PATIENCE, is_alive, wait_until

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

SIM = ("--backend", "sim", "--sim-step-ms", "20")
"""Steps of 20 ms, so that streams last on any machine."""
NATIVE = ("--threads", "1", "--kv-cache-memory-bytes", str(64 << 20))


class HttpServer:
    """Clients of the server at `url`."""

    url = ""

    def client(self, key: str = "none") -> "OpenAI":
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def async_client(self) -> "AsyncOpenAI":
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def get(self, path: str, timeout: float = PATIENCE) -> tuple[int, str]:
        """Return status and body; 0 without a whole answer in time."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except (OSError, HTTPException):
            return 0, ""

    def wait_readyz(self, ready: bool = True) -> None:
        status = 200 if ready else 503
        wait_until(lambda: self.get("/readyz", 10.0)[0] == status, f"/readyz is {status}")

    def wait_engines(self, count: int) -> None:
        """Wait until so many engines are ready."""
        wait_until(lambda: self.metric("engine_ready") == count, f"{count} engines are ready")

    def metric(self, name: str) -> float:
        """Return a gauge or counter by its name without prefix, summed over its labels."""
        found = samples(self.get("/metrics")[1], f"runahead:{name}")
        assert found, f"no metric {name}"
        return sum(sample.value for sample in found)


class ServeProcess(HttpServer):
    """A running `serve`, of the demo model unless another one is named.

    Its sockets are under `runtime`, its log is the file `log`. It and its services are forked from a process with all
    imports (forked.py), or interpreters, as a user starts them.
    """

    def __init__(self, *arguments: str, forked: bool = True, patch: str = "", **environment: str) -> None:
        """`patch`: code that runs first in the forked process."""
        self.runtime = Path(tempfile.mkdtemp(prefix="ra-"))
        self.log = self.runtime.with_suffix(".log")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RUNAHEAD_")}
        settings = {"RUNAHEAD_MODEL": str(DEMO_MODEL), "XDG_RUNTIME_DIR": str(self.runtime), **environment}
        with self.log.open("w") as log:
            self.process: PreloadedProcess | subprocess.Popen[bytes] = (
                PreloadedProcess(
                    f"{patch}\n{forked_serve.CODE}", "serve", *arguments,
                    pipes=(OUTPUT,), log=log, environment={**clean, **settings}, is_parent=True,
                )
                if forked
                else subprocess.Popen(
                    [sys.executable, "-m", "services.cli", "serve", *arguments],
                    env={**clean, **settings}, stdout=subprocess.PIPE, stderr=log, bufsize=0,
                )
            )  # fmt: skip
        self.services: dict[str, psutil.Process] = {}

    def wait_ready(self) -> None:
        self.welcome = self.process.stdout.readline().decode()
        match = re.search(r"https?://\S+(?=/v1 )", self.welcome)
        assert match, f"not ready; its log:\n{self.log.read_text()}"
        self.url = match[0]
        self.find_services()

    def find_services(self) -> None:
        """Find the child processes by name. Call it again after a restart. A server that has ended has none."""
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return
        for child in children:
            # It has ended, or its command line is not there yet
            with contextlib.suppress(psutil.NoSuchProcess, ValueError):
                self.services[name_of(child)] = child

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def stop(self, number: int = SIGTERM) -> None:
        """Let it end in order."""
        self.signal(number)
        assert self.wait() == 0, self.log.read_text()
        self.assert_nothing_is_left()

    def last_line(self) -> str:
        return self.log.read_text().splitlines()[-1]

    def assert_nothing_is_left(self) -> None:
        wait_until(lambda: not any(map(is_alive, self.services.values())), "all services have ended")
        assert list(self.runtime.iterdir()) == [], "sockets or files are left"

    def clean_up(self) -> None:
        self.find_services()
        for process in (self.process, *self.services.values()):
            with contextlib.suppress(psutil.NoSuchProcess):  # services die with the server
                process.kill()
        self.process.wait()
        wait_until(lambda: not any(map(is_alive, self.services.values())), "all services have ended")
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.runtime)
        self.log.unlink()


def name_of(service: psutil.Process) -> str:
    """Return the name of a child of `serve`.

    Raises: ValueError: its command line or its name is not there yet.
    """
    command = service.cmdline()
    if forked_serve.ENTRY_POINT in command:
        return Path(command[command.index(forked_serve.ENTRY_POINT) + 2]).stem
    name = service.name()
    if not name.startswith(("frontend", "scheduler", "worker")):
        raise ValueError(name)
    return name


@contextlib.contextmanager
def serving(
    *arguments: str, wait: bool = True, forked: bool = True, patch: str = "", **environment: str
) -> Iterator[ServeProcess]:
    """Start a server on a free port and yield it. At the end, kill all its processes and remove its files."""
    server = ServeProcess("--port", "0", *arguments, forked=forked, patch=patch, **environment)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        server.clean_up()
