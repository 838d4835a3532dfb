"""HTTP requests of a batch."""

import asyncio
import email.utils
import json
import time
from typing import Any, NamedTuple

from services.cli.run_batch.connection import HttpAnswer, HttpConnection, Target
from services.cli.run_batch.lines import BatchRequest
from services.cli.settings import ConfigurationError

ANSWER_SECONDS = 3600.0
"""Seconds to wait for a whole answer; the server ends requests without progress much earlier."""
CONNECT_SECONDS = 5.0
OVERLOADED = (429, 503)
PAUSE_SECONDS = 1.0
"""Pause before a request is sent again, unless the server's `Retry-After` says another one."""
MOST_SECONDS = 600.0
"""Maximum sum of a request's pauses, and of a single one."""
ATTEMPTS = 3
"""Number of connections to a server that does not answer."""


class ServerGone(Exception):
    """No connection, or it broke."""


class BatchAnswer(NamedTuple):
    status: int
    request_id: str
    body: Any


async def reach(target: Target) -> None:
    """Raises: ConfigurationError, if the server does not list its models"""
    connection = HttpConnection(target)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            status = (await connection.request("GET", "/v1/models")).status
    except OSError as error:  # also a time limit
        reason = str(error) or f"no answer within {CONNECT_SECONDS:g} s"
        raise ConfigurationError(f"--url: no answer from {target.host}: {reason}") from None
    finally:
        connection.close()
    if status != 200:
        hint = "; give the key with RUNAHEAD_API_KEY or --api-key" if status == 401 else ""
        raise ConfigurationError(f"--url: {target.host} answers /v1/models with status {status}{hint}")


class RequestSender:
    """Sends up to `concurrency` requests at a time, each on a connection of its own that later ones use again."""

    def __init__(self, target: Target, concurrency: int) -> None:
        self._target = target
        self._slots = asyncio.Semaphore(concurrency)
        self._idle: list[HttpConnection] = []

    async def send(self, request: BatchRequest) -> BatchAnswer:
        """Return the answer; a refusal for load is repeated when the server says so.

        Raises: ServerGone
        """
        async with self._slots:
            connection = self._idle.pop() if self._idle else HttpConnection(self._target)
            try:
                answer, waited = await _attempt(connection, request), 0.0
                while answer.status in OVERLOADED and waited < MOST_SECONDS:
                    pause = pause_of(answer)
                    await asyncio.sleep(pause)
                    answer, waited = await _attempt(connection, request), waited + pause
            finally:
                self._idle.append(connection)
        return BatchAnswer(answer.status, answer.headers.get("x-request-id", ""), _decoded(answer.body))

    def close(self) -> None:
        """Close all connections. No request may be open."""
        for connection in self._idle:
            connection.close()


async def _attempt(connection: HttpConnection, request: BatchRequest) -> HttpAnswer:
    """Raises: ServerGone"""
    reason: Exception | None = None
    for attempt in range(ATTEMPTS):
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await connection.request("POST", request.url, request.body)
        except OSError as error:  # such as a connection that was closed when idle
            reason = error
            await asyncio.sleep(PAUSE_SECONDS if attempt else 0)
    raise ServerGone(f"the server is gone: {reason}") from reason


def pause_of(answer: HttpAnswer) -> float:
    """Return the seconds of `Retry-After`, which is a number or a date."""
    given = answer.headers.get("retry-after", "")
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(given).timestamp() - time.time()
        except ValueError:
            seconds = PAUSE_SECONDS
    return min(max(seconds, 0.0), MOST_SECONDS) if seconds == seconds else PAUSE_SECONDS


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")
