"""Change of an engine's settings while it serves: another engine starts beside it, streams move, and it ends.

The supervisor of `serve` starts and stops processes; what happens between is decided here.
"""

import asyncio
import contextlib
import json
import logging
import time
from typing import Any

from typing_extensions import TypedDict

from services.frontend.engine.client import EngineClient
from services.frontend.errors import APIError

log = logging.getLogger("runahead.frontend")

POLL_INTERVAL = 0.1
"""Seconds between two looks at the new engine."""
CONTROL_TIMEOUT = 60.0
"""Seconds until the supervisor answers: it checks files and memory first."""
OTHER_WEIGHTS = (
    "the engine of this request ends, and its successor has other weights or another context length; send the request "
    "again"
)


class ReplanStatus(TypedDict):
    phase: str
    """none, starting, moving, done or failed."""
    engine: str
    """Name of the new engine."""
    detail: str


class Replans:
    """At most one change at a time. `control`: Unix socket of the supervisor; None: there is none."""

    def __init__(self, client: EngineClient, control: str | None) -> None:
        self._client, self._control = client, control
        self._running: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        """Held while the supervisor checks settings and starts an engine."""
        self.status: ReplanStatus = {"phase": "none", "engine": "", "detail": ""}
        """The last change."""

    async def begin(self, settings: dict[str, Any], start_timeout: float, drain_timeout: float) -> str:
        """Start an engine with other settings, which replaces those that there are. Return its name.

        Args:
            start_timeout: seconds until it must be ready.
            drain_timeout: seconds until the streams that cannot move, as its identity is another one, are ended.

        Raises: APIError
        """
        if self._beginning.locked() or (self._running is not None and not self._running.done()):
            raise APIError(409, "another change of engines is under way; /engines/replan shows it")
        self._client.check_ready()
        async with self._beginning:
            answer = await self._ask({"do": "start", "settings": settings})
        if "error" in answer:
            raise APIError(400, answer["error"])
        name, replaced = answer["engine"], answer["replaces"]
        self._set("starting", name, f"in place of {', '.join(replaced)}")
        self._running = asyncio.create_task(self._run(name, replaced, start_timeout, drain_timeout))
        return str(name)

    def _set(self, phase: str, name: str, detail: str) -> None:
        self.status = {"phase": phase, "engine": name, "detail": detail}
        log.info("replan: engine %s: %s %s", name, phase, detail)

    async def _run(self, name: str, replaced: list[str], start_timeout: float, drain_timeout: float) -> None:
        try:
            await self._wait_ready(name, time.monotonic() + start_timeout)
        except APIError as error:
            self._set("failed", name, str(error))
            with contextlib.suppress(APIError):  # there is no supervisor
                await self._ask({"do": "stop", "engine": name})
            return
        try:
            await self._replace(name, replaced, drain_timeout)
        except APIError as error:
            self._set("failed", name, str(error))

    async def _replace(self, name: str, replaced: list[str], drain_timeout: float) -> None:
        """Raises: APIError, if the supervisor does not answer, or the new engine serves no longer"""
        await self._ask({"do": "adopt", "engine": name})
        await self._wait_ready(name, time.monotonic() + drain_timeout)  # so that all drain, or none does
        self._set("moving", name, f"streams leave {', '.join(replaced)}")
        for old in replaced:
            if old in self._client.engines:
                self._client.engines.drain(old)
        await self._wait_left(name, replaced, time.monotonic() + drain_timeout)
        for old in replaced:
            await self._ask({"do": "stop", "engine": old})
        self._set("done", name, f"in place of {', '.join(replaced)}")

    async def _wait_ready(self, name: str, end: float) -> None:
        """Raises: APIError, if the new engine cannot serve, or the supervisor does not answer"""
        while True:
            engine = self._client.engines.get(name)
            if engine is not None and engine.ready:
                return
            if engine is not None and engine.refusal:
                raise APIError(503, engine.refusal)
            if error := (await self._ask({"do": "status", "engine": name})).get("error"):
                raise APIError(503, error)
            if time.monotonic() > end:
                raise APIError(503, "it was not ready in time")
            await asyncio.sleep(POLL_INTERVAL)

    async def _wait_left(self, name: str, replaced: list[str], end: float) -> None:
        """Wait until the engines have no streams. Those that cannot move are ended at `end`, monotonic seconds."""
        engines, ledger = self._client.engines, self._client.ledger
        while left := [entry for old in replaced for entry in ledger.owned(old)]:
            if time.monotonic() >= end:
                successor = engines.get(name)
                identity = successor.identity if successor is not None else ""
                ended = [entry.stream for entry in left if not identity or entry.identity != identity]
                self._client.fail(ended, APIError(503, OTHER_WEIGHTS))
            await asyncio.sleep(POLL_INTERVAL)

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises: APIError, without an answer"""
        if self._control is None:
            raise APIError(
                400, "the engines of this server are started by others; change --engines, and drain the old one"
            )
        try:
            encoded = json.dumps(request).encode()
            reader, writer = await asyncio.open_unix_connection(self._control)
            try:
                writer.write(encoded + b"\n")
                line = await asyncio.wait_for(reader.readline(), CONTROL_TIMEOUT)
            finally:
                writer.close()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError, TimeoutError) as error:
            raise APIError(503, f"the supervisor does not answer: {error}") from None
        return answer
