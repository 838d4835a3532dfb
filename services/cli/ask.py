"""GET requests to a running server, for commands that inspect it."""

import errno
import http.client
import json
import os
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from services.cli.healthcheck import own_tls

TIMEOUT = 5.0
"""Seconds to wait for an answer."""
CHANGE_TIMEOUT = 90.0
"""Seconds to wait for the answer to a request that changes the server."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts whose certificate is not checked: this machine, which has another name in it."""

UNREACHABLE: tuple[int, ...] = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Errors that an address, without a server that answers, has."""


class NoAnswer(Exception):
    """The reason, in one line."""


def base_url(url: str) -> str:
    """Return the URL of a server without /v1, which clients of the API have at its end."""
    return url.rstrip("/").removesuffix("/v1")


def ask(url: str, api_key: str, body: bytes | None = None, timeout: float = TIMEOUT) -> bytes:
    """Return the body of the answer to a GET request, or to a POST request with a body. Raises: NoAnswer"""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise NoAnswer(f"{url} is no URL of a server; give one such as http://127.0.0.1:8000")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    context = own_tls() if parts.hostname in LOOPBACK else ssl.create_default_context()
    try:
        request = urllib.request.Request(url, body, headers)  # noqa: S310  the scheme is checked above
        with urllib.request.urlopen(request, timeout=timeout, context=context) as answer:  # noqa: S310
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        hint = "; set RUNAHEAD_API_KEY or --api-key" if error.code == 401 else _server_reason(error)
        raise NoAnswer(f"{url}: status {error.code}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise NoAnswer(f"{url}: no answer: {reason_of(reason)}") from None


def send(url: str, api_key: str, content: object = None) -> dict[str, Any]:
    """Return the answer to a POST request with a JSON body. Raises: NoAnswer"""
    answer = json.loads(ask(url, api_key, json.dumps(content).encode(), CHANGE_TIMEOUT))
    assert isinstance(answer, dict)
    return answer


def reason_of(error: object) -> str:
    """Return why a connection failed: the system's words, such as "connection refused", where they say all of it."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number in UNREACHABLE else str(error)


def _server_reason(error: urllib.error.HTTPError) -> str:
    """Return the server's reason after a colon; "" if its body has none."""
    try:
        return f": {json.loads(error.read())['error']['message']}"
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return ""


def ask_object(url: str, api_key: str, *fields: str) -> dict[str, Any]:
    """Return the answer, a JSON object with at least `fields`. Raises: NoAnswer, also if another program answers"""
    try:
        answer = json.loads(ask(url, api_key))
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not answer.keys() >= set(fields):
        raise NoAnswer(f"{url}: the answer is not that of a Runahead server; check the address")
    return answer
