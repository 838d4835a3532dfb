"""Another frontend beside that of `serve`, which a test may kill and start again."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator

from services.cli.preflight import free_port
from tests.e2e.server import HttpServer, ServeProcess, wait_until


class SecondFrontend(HttpServer):
    def __init__(self, server: ServeProcess, *arguments: str) -> None:
        (config,) = server.runtime.glob("*/frontend.json")
        port = free_port("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port}"
        self._command = [
            sys.executable, "-m", "services.cli", "frontend", "--port", str(port), "--scheduler-endpoint",
            f"ipc://{config.with_name('clients')}", "--model", json.loads(config.read_text())["model"],
            *arguments,
        ]  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start its process, and wait until it can execute requests."""
        self._process = await asyncio.create_subprocess_exec(*self._command, stderr=asyncio.subprocess.DEVNULL)
        await asyncio.to_thread(wait_until, lambda: self.get("/readyz")[0] == 200, "the other frontend is ready")

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def second_frontend(server: ServeProcess, *arguments: str) -> AsyncIterator[SecondFrontend]:
    """Start another frontend, which is killed at the end."""
    frontend = SecondFrontend(server, *arguments)
    try:
        await frontend.start()
        yield frontend
    finally:
        await frontend.kill()
