"""What stands before every route, as pure ASGI: keys, body size, request ids. Decided from the scope alone."""

import asyncio
import hashlib
import hmac
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.errors import APIError

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
"""Everything else needs a key where keys are configured."""
MAX_HEADERS = 100
STALL_TIMEOUT = 30.0
"""Seconds that a client may leave its answer unread; then it counts as gone, and its request is aborted."""


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


class Guards:
    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int, stall_timeout: float = STALL_TIMEOUT
    ) -> None:
        self._app = app
        self._stall_timeout = stall_timeout
        self._keys = [_digest(key.encode()) for key in api_keys]
        self._max_body = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")[:128] or uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode("latin-1")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", []).append((b"x-request-id", request_id))
            async with asyncio.timeout(self._stall_timeout):
                await send(message)  # waits while the connection's buffer is full

        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send_with_id)
            return
        await self._app(scope, self._bounded(receive), send_with_id)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> APIError | None:
        if len(scope["headers"]) > MAX_HEADERS:
            return APIError(431, f"at most {MAX_HEADERS} headers are allowed")
        if self._keys and scope["path"] not in OPEN_PATHS and not self._authorized(headers):
            return APIError(401, "a valid API key is needed as bearer token", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body:
            return self._too_large()
        return None

    def _authorized(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _too_large(self) -> APIError:
        return APIError(413, f"the request body is larger than {self._max_body} bytes")

    def _bounded(self, receive: Receive) -> Receive:
        """Counts the body while it is read; what a header promised does not matter."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise self._too_large()
            return message

        return bounded
