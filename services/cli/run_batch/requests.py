"""HTTP requests of a batch, one connection per thread."""

import http.client
import json
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from services.cli.readiness import UnixConnection
from services.cli.run_batch.lines import BatchRequest
from services.cli.settings import ConfigurationError

ANSWER_SECONDS = 3600.0
"""Seconds to wait for a whole answer; the server ends requests without progress much earlier."""
CONNECT_SECONDS = 5.0
OVERLOADED = (429, 503)
PAUSE_SECONDS, MOST_PAUSES = 1.0, 600
"""Pause before a refused request is sent again, and the number of times."""
ATTEMPTS = 3
"""Number of connections to a server that does not answer."""


class ServerGone(Exception):
    """No connection, or it broke."""


class BatchAnswer(NamedTuple):
    status: int
    request_id: str
    body: Any


@dataclass(frozen=True)
class Target:
    """Address of the server: a Unix socket, or host and port."""

    host: str
    port: int | None = None
    socket: str = ""
    is_tls: bool = False
    root: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_socket(cls, path: str) -> "Target":
        return cls("localhost", socket=path)

    @classmethod
    def from_url(cls, url: str, api_keys: list[str]) -> "Target":
        """Raises: ConfigurationError"""
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host:
            raise ConfigurationError(f"--url: {url} names no host; give one such as http://127.0.0.1:8000")
        headers = {"Authorization": f"Bearer {api_keys[0]}"} if api_keys else {}
        root = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port, is_tls=parts.scheme == "https", root=root, headers=headers)

    def connect(self, seconds: float) -> http.client.HTTPConnection:
        if self.socket:
            return UnixConnection(self.socket, seconds)
        if self.is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=seconds, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=seconds)


def reach(target: Target) -> None:
    """Raises: ConfigurationError, if the server does not list its models"""
    connection = target.connect(CONNECT_SECONDS)
    try:
        connection.request("GET", f"{target.root}/v1/models", headers=target.headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise ConfigurationError(f"--url: no answer from {target.host}: {error}") from None
    finally:
        connection.close()
    if status != 200:
        hint = "; give the key with RUNAHEAD_API_KEY or --api-key" if status == 401 else ""
        raise ConfigurationError(f"--url: {target.host} answers /v1/models with status {status}{hint}")


class RequestSender:
    """Sends requests; each thread has a connection of its own, which stays open."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._threads = threading.local()
        self._connections: list[http.client.HTTPConnection] = []

    def send(self, request: BatchRequest) -> BatchAnswer:
        """Return the answer; a refusal for load is repeated.

        Raises: ServerGone
        """
        answer, pauses = self._send(request), 0
        while answer.status in OVERLOADED and pauses < MOST_PAUSES:
            time.sleep(PAUSE_SECONDS)
            answer, pauses = self._send(request), pauses + 1
        return answer

    def _send(self, request: BatchRequest) -> BatchAnswer:
        headers = {**self._target.headers, "Content-Type": "application/json"}
        reason: Exception | None = None
        for attempt in range(ATTEMPTS):
            connection = self._connection()
            try:
                connection.request("POST", self._target.root + request.url, request.body, headers)
                response = connection.getresponse()
                content = response.read()
            except (
                OSError,
                http.client.HTTPException,
            ) as error:  # such as a connection that was closed when idle
                connection.close()
                reason = error
                time.sleep(PAUSE_SECONDS if attempt else 0)
                continue
            return BatchAnswer(response.status, response.headers.get("x-request-id", ""), _decoded(content))
        raise ServerGone(f"the server is gone: {reason}") from reason

    def _connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection; it connects again after it was closed."""
        known: dict[str, http.client.HTTPConnection] = self._threads.__dict__
        if "connection" not in known:
            known["connection"] = self._target.connect(ANSWER_SECONDS)
            self._connections.append(known["connection"])
        return known["connection"]

    def close(self) -> None:
        """Close all connections. No request may be open."""
        for connection in self._connections:
            connection.close()


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode(errors="replace")
