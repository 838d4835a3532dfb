"""Another frontend beside that of `serve`, which a test may kill and start again."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator

from services.cli.preflight import free_port
from tests.e2e.server import HttpServer, ServeProcess, wait_until
from tests.e2e.streams import COMMAND
from tests.preloaded import PreloadedProcess


class SecondFrontend(HttpServer):
    def __init__(self, server: ServeProcess, *arguments: str) -> None:
        (config,) = server.runtime.glob("*/frontend.json")
        port = free_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = [
            "frontend", "--port", str(port), "--scheduler-endpoint", f"ipc://{config.with_name('clients')}", "--model",
            json.loads(config.read_text())["model"], *arguments,
        ]  # fmt: skip
        self._process: PreloadedProcess | None = None

    async def start(self) -> None:
        """Start its process, and wait until it can execute requests."""
        self._process = self._started()
        await asyncio.to_thread(wait_until, lambda: self.get("/readyz")[0] == 200, "the other frontend is ready")

    def _started(self) -> PreloadedProcess:
        with open(os.devnull, "w") as log:
            return PreloadedProcess(COMMAND, *self._arguments, log=log)

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


@contextlib.asynccontextmanager
async def second_frontend(server: ServeProcess, *arguments: str) -> AsyncIterator[SecondFrontend]:
    """Start another frontend, which is killed at the end."""
    frontend = SecondFrontend(server, *arguments)
    try:
        await frontend.start()
        yield frontend
    finally:
        await frontend.kill()
