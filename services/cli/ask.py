"""Requests to a running server, for commands that inspect or change it."""

import errno
import http.client
import io
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from services.cli.healthcheck import bearer, client_tls, get
from services.config import ClientConfig
from services.config.commands import ServerConfig

TIMEOUT = 5.0
"""Seconds to wait for an answer."""
CHANGE_TIMEOUT = 90.0
"""Seconds to wait for the answer to a request that changes the server."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts whose certificate is not checked: this machine, which has another name in it. No proxy is asked for them."""

UNREACHABLE: tuple[int, ...] = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors that an address, without a server that answers, has."""
_KEY_HINT = "; set RUNAHEAD_API_KEY or --api-key"

C = TypeVar("C", bound=ServerConfig)


class NoAnswer(Exception):
    """The reason, in one line."""


def base_url(url: str) -> str:
    """Return the URL of a server without /v1, which clients of the API have at its end."""
    return url.rstrip("/").removesuffix("/v1")


def host_of(url: str) -> str:
    """Return the host of a server's URL; "" if it names none."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "") if parts.scheme in ("http", "https") and parts.port != 0 else ""
    except ValueError:
        return ""


@dataclass(frozen=True)
class ServerAddress:
    """A running server, and how commands call it."""

    url: str
    """Without /v1 at its end."""
    client: ClientConfig = field(default_factory=ClientConfig)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of requests: the API key, if there is one."""
        return bearer(self.client.api_key)

    def tls(self) -> ssl.SSLContext:
        """Raises: NoAnswer, if the URL or a file cannot be used"""
        if not (host := host_of(self.url)):
            raise NoAnswer(f"{self.url} is no URL of a server; give one such as http://127.0.0.1:8000")
        client = self.client
        is_trusted = client.insecure or (not client.cacert and host in LOOPBACK)
        certificate = client.ssl_certfile if urlsplit(self.url).scheme == "https" else None
        return client_tls(None if is_trusted else client.cacert, certificate, client.ssl_keyfile, NoAnswer)


def about_server(command: Callable[[ServerAddress, C], int]) -> Callable[[C], int]:
    """Decorate a command about a running server. Without an answer, its exit status is 1."""

    @wraps(command)
    def run(config: C) -> int:
        try:
            return command(ServerAddress(base_url(config.url), config), config)
        except BrokenPipeError:  # of stdout, not of the server
            raise
        except (NoAnswer, OSError) as error:
            print(f"runahead: {error}", file=sys.stderr)
            return 1

    return run


def ask(server: ServerAddress, path: str, body: bytes | None = None) -> bytes:
    """Return the body of the answer to a GET request, or to a POST request with a body. Raises: NoAnswer"""
    url = server.url + path
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=server.tls())]
    if host_of(url) in LOOPBACK:  # a proxy's own machine has another server at this address, or none
        handlers.append(urllib.request.ProxyHandler({}))
    timeout = TIMEOUT if body is None else CHANGE_TIMEOUT
    try:
        request = urllib.request.Request(url, body)  # noqa: S310  `tls` checks the scheme
        for header in server.headers.items():  # for this server alone, not for one that it redirects to
            request.add_unredirected_header(*header)
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        raise NoAnswer(f"{url}: status {error.code}{_server_reason(error.code, error)}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoAnswer(f"{url}: no answer: {reason_of(reason)}") from None


def first_model(server: ServerAddress) -> str:
    """Return the first model that a server lists, "" if it names none. As the requests of a load, without proxies.

    Raises: NoAnswer, also if the server refuses the key
    """
    try:
        status, body = get(f"{server.url}/v1/models", TIMEOUT, server.tls(), headers=server.headers)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(f"no server answers at {server.url}: {reason_of(error)}") from None
    if status != 200:
        raise NoAnswer(f"{server.url}/v1/models: status {status}{_server_reason(status, io.BytesIO(body))}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (KeyError, IndexError, TypeError, ValueError):
        return ""


def reason_of(error: object) -> str:
    """Return why a connection failed: the system's words, such as "connection refused", where they say all of it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number in UNREACHABLE else str(error)


def _server_reason(status: int, body: IO[bytes]) -> str:
    """Return the server's reason after a colon, or how to give a key; "" if its body has none."""
    if status == 401:
        return _KEY_HINT
    try:
        return f": {json.load(body)['error']['message']}"
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return ""


def ask_object(server: ServerAddress, path: str, *fields: str, content: object = None) -> dict[str, Any]:
    """Return the answer, a JSON object with at least `fields`, to a GET request, or to a POST request with `content`.

    Raises: NoAnswer, also if another program answers
    """
    body = None if content is None else json.dumps(content).encode()
    try:
        answer = json.loads(ask(server, path, body))
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not answer.keys() >= set(fields):
        raise NoAnswer(f"{server.url}{path}: the answer is not that of a Runahead server; check the address")
    return answer
