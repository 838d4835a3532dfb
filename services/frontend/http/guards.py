"""Checks before every route, as pure ASGI: API keys, body size, load, request ids."""

import contextlib
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.config import HttpConfig
from services.frontend.errors import ANTHROPIC_PREFIX, APIError, error_response

log = logging.getLogger("runahead.frontend")

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/ping"})
"""Paths that need no key, even if keys are configured."""
MAX_HEADERS = 100
IGNORED_HEADER = b"x-ignored-parameters"
"""Names of the body's unknown fields, which were ignored."""
_ORIGIN = re.compile("^https?://[^/]*", re.IGNORECASE)
"""Beginning of a request's target in absolute form (RFC 9112, 3.2.2)."""
_LENGTHS = {b"content-length", b"transfer-encoding"}
"""With both, a proxy may see another end of the request than this server, and what follows as a request of its own (RFC
9112, 6.3)."""
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""Valid ids from clients: printable and without spaces, as they are written to logs."""


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class Guards:
    """Sets `state.request_id`, and `state.tenant`: a digest of the API key, "" if no keys are configured."""

    def __init__(
        self,
        app: ASGIApp,
        config: HttpConfig,
        max_body_bytes: int,
        public: frozenset[str] = frozenset(),
        shed: Callable[[Scope, bool], APIError | None] = lambda *_: None,
        on_response: Callable[[Scope, int], None] = lambda *_: None,
    ) -> None:
        """
        Args:
            public: paths of files without data, which need no key. Their header Host is checked.
            shed: returns why a request that passes the other checks is refused for load, or None, from its scope and
                whether too many connections are open.
            on_response: called with the status of each response.
        """
        self._app = app
        self._on_response = on_response
        self._public = public
        self._shed = shed
        self._keys = [_digest(key.encode()) for key in config.api_key]
        self._hosts = tuple(host.lower() for host in config.answered_hosts)
        self._root = config.root_path
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # websockets and lifespan events are not served
            return
        scope["path"] = self._below_root(scope["path"])
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._on_response(scope, message["status"])
                names = scope["state"].get("ignored_parameters")
                extra = [(b"x-request-id", request_id)]
                if scope["path"].startswith(ANTHROPIC_PREFIX):
                    extra.append((b"request-id", request_id))  # Anthropic's client reads it
                if names:
                    extra.append((IGNORED_HEADER, ", ".join(names).encode()))
                if is_crowded or has_two_lengths:
                    extra.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        tenant = self._tenant(headers)
        connection = scope.setdefault("state", {}).get("connection")
        is_crowded = connection is not None and connection.is_crowded
        has_two_lengths = headers.keys() >= _LENGTHS
        scope["state"].update(request_id=request_id.decode(), tenant=tenant or "")
        refusal = self._refusal(scope, headers, tenant)
        if (refusal := refusal or self._shed(scope, is_crowded)) is not None:
            log.debug(
                "request refused: request_id=%s status=%d: %s", request_id.decode(), refusal.status, refusal.logged
            )
            response = error_response(refusal, scope["path"], request_id.decode())
            with contextlib.nullcontext() if connection is None else connection.one_write():
                await response(scope, receive, send_with_id)
            return
        await self._app(scope, self._bounded(receive), send_with_id)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes], tenant: str | None) -> APIError | None:
        if len(scope["headers"]) > MAX_HEADERS:
            return APIError(431, f"at most {MAX_HEADERS} headers are allowed")
        if headers.keys() >= _LENGTHS:
            return APIError(400, "a request has Content-Length or Transfer-Encoding, not both; leave one out")
        if scope["path"] not in OPEN_PATHS and not self._is_allowed(headers.get(b"host", b"")):
            return APIError(400, "the header Host names no host of this server; --allowed-hosts lists its hosts")
        if tenant is None and scope["path"] not in OPEN_PATHS | self._public:
            return APIError(401, "a valid API key is needed as bearer token", code="invalid_api_key")
        is_page = headers.get(b"sec-fetch-site") == b"cross-site" and scope["method"] == "POST"
        if is_page and not headers.get(b"content-type", b"").startswith(b"application/json"):  # sent without preflight
            return APIError(403, "a page of another site must send Content-Type: application/json")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self._max_body):
            return self._too_large()
        return None

    def _below_root(self, path: str) -> str:
        """Return the path without a scheme and host, without the root path, which only some proxies remove, and without
        a slash at its end. A redirect would name the scheme that a proxy uses here."""
        if not path.startswith("/"):
            path = _ORIGIN.sub("", path) or "/"
        below = path.removeprefix(self._root) if path.startswith(f"{self._root}/") else path
        return below.rstrip("/") or "/"

    def _is_allowed(self, given: bytes) -> bool:
        if not self._hosts:
            return True
        host = re.sub(r":\d*$", "", given.decode("latin-1").lower())
        return any(
            host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed or allowed == "*"
            for allowed in self._hosts
        )

    def _tenant(self, headers: dict[bytes, bytes]) -> str | None:
        """Return a digest of the API key, None if it is not valid. All keys are compared, in constant time."""
        if not self._keys:
            return ""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if not scheme:
            scheme, given = b"bearer", headers.get(b"x-api-key", b"")  # of Anthropic's clients
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return digest.hex()[:16] if any(matches) and scheme.lower() == b"bearer" else None

    def _too_large(self) -> APIError:
        return APIError(413, f"the request body is larger than {self._max_body} bytes (--max-body-bytes)")

    def _bounded(self, receive: Receive) -> Receive:
        """Count the body's bytes while it is read, whatever its headers declare."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise self._too_large()
            return message

        return bounded


EXPOSED = ["x-request-id", "request-id", "retry-after", IGNORED_HEADER.decode()]
"""Headers of responses that pages may read."""


def with_cors(app: ASGIApp, config: HttpConfig) -> ASGIApp:
    """Answer preflight requests, which carry no API key, and add the headers that browsers ask for."""
    if not config.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=EXPOSED,
    )
