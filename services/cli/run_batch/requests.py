"""HTTP requests of a batch."""

import asyncio
import email.utils
import json
import threading
import time
from typing import Any

import httpx

from services.cli.ask import ServerAddress
from services.cli.run_batch.lines import BatchRequest

ANSWER_SECONDS = 3600.0
"""Seconds to wait for a whole answer; the server ends requests without progress much earlier."""
OVERLOADED = (429, 503)
PAUSE_SECONDS = 1.0
"""Pause before a request is sent again, unless the server's `Retry-After` says another one."""
LEAST_SECONDS = 0.1
"""Minimum of a pause: a date of `Retry-After` may be past by this machine's clock."""
MOST_SECONDS = 600.0
"""Maximum sum of a request's pauses, and of a single one."""
ATTEMPTS = 3
"""Number of connections that may break during a request, which may itself be the reason."""
CONNECTS = 60
"""Number of connections to a server that is not there, with a pause after each: a frontend that has ended is started
again."""


class ServerGone(Exception):
    """No connection, or it broke."""


class RequestSender:
    """Sends up to `concurrency` requests at a time, over connections that stay open. `socket`: Unix socket on which the
    server listens; None: at its address. `server_ended` is set when the server is not started again."""

    def __init__(
        self, server: ServerAddress, socket: str | None, concurrency: int, server_ended: threading.Event
    ) -> None:
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(verify=server.tls(), limits=limits, uds=socket),
            base_url=server.url,
            headers=server.headers,
            timeout=ANSWER_SECONDS,
        )
        self._slots = asyncio.Semaphore(concurrency)
        self._server_ended = server_ended

    async def send(self, request: BatchRequest) -> dict[str, Any]:
        """Return the answer, as the file has it; a refusal for load is repeated when the server says so.

        Raises: ServerGone
        """
        async with self._slots:
            answer, waited = await self._attempt(request), 0.0
            while answer.status_code in OVERLOADED and waited < MOST_SECONDS:
                pause = pause_of(answer)
                await asyncio.sleep(pause)
                answer, waited = await self._attempt(request), waited + pause
        request_id = answer.headers.get("x-request-id", "")
        return {"status_code": answer.status_code, "request_id": request_id, "body": _decoded(answer.content)}

    async def close(self) -> None:
        """Close all connections. No request may be open."""
        await self._client.aclose()

    async def _attempt(self, request: BatchRequest) -> httpx.Response:
        """Raises: ServerGone"""
        headers, broken, absent = {"content-type": "application/json"}, 0, 0
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await self._client.post(request.url, content=request.body, headers=headers)
            except (OSError, httpx.HTTPError) as error:  # such as a connection that was closed when idle
                is_absent, reason = isinstance(error, httpx.ConnectError), error
            absent, broken = absent + is_absent, broken + (not is_absent)
            if self._server_ended.is_set() or broken == ATTEMPTS or absent == CONNECTS:
                raise ServerGone(f"the server is gone: {reason}") from reason
            await asyncio.sleep(PAUSE_SECONDS if broken + absent > 1 else 0)


def pause_of(answer: httpx.Response) -> float:
    """Return the seconds of `Retry-After`, which is a number or a date."""
    given = answer.headers.get("retry-after", "")
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(given).timestamp() - time.time()
        except ValueError:
            seconds = PAUSE_SECONDS
    return min(max(seconds, LEAST_SECONDS), MOST_SECONDS) if seconds == seconds else PAUSE_SECONDS


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")
