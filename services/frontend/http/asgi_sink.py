"""The body of a streamed response, written through ASGI: for servers other than this frontend's own, as Ray Serve's."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Send

FULL_BYTES = 64 * 1024
"""Bytes that wait for the server; writers wait while there are more."""


class ASGISink:
    """Sends as one message what was written while the last one was sent."""

    def __init__(self, send: Send) -> None:
        self.is_full = False
        self.on_writable: Callable[[], None] | None = None
        self._send = send
        self._waiting = bytearray()
        self._changed = asyncio.Event()
        self._is_complete = False

    def write(self, data: bytes) -> None:
        self._waiting += data
        self.is_full = len(self._waiting) > FULL_BYTES
        self._changed.set()

    async def _run(self) -> None:
        while self._waiting or not self._is_complete:
            await self._changed.wait()
            self._changed.clear()
            body, self._waiting = bytes(self._waiting), bytearray()
            if body:
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
            if self.is_full and len(self._waiting) <= FULL_BYTES:
                self.is_full = False
                if self.on_writable is not None:
                    self.on_writable()

    @classmethod
    @asynccontextmanager
    async def open(cls, send: Send) -> AsyncIterator["ASGISink"]:
        """Yield a sink. What was written has been sent when this context ends, unless it is cancelled."""
        sink = cls(send)
        sending = asyncio.create_task(sink._run())
        try:
            try:
                yield sink
            except Exception:
                sink._finish()
                await sending
                raise
            sink._finish()
            await sending
        finally:
            sending.cancel()

    def _finish(self) -> None:
        self._is_complete = True
        self._changed.set()
