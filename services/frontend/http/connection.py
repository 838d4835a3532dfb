"""uvicorn's HTTP/1.1 connection with time limits. It uses h11, as httptools does not limit the size of headers."""

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from services.frontend.errors import invalid

HEAD_SECONDS = 30.0
"""Time limit for a client to send the head of a request."""
STALL_SECONDS = 30.0
"""Time limit for a client to read, once the buffers of its response are full."""
UNREAD_GRACE = 0.05
"""Seconds between the end of a connection's idle time and its closing; a request that had arrived is read meanwhile."""
RESERVED_FILES = 256
"""File descriptors that are left for other purposes than connections; at most half of all."""


class _JoinedWrites(asyncio.Transport):
    """The part of a transport that a response uses. All bytes are written at once."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._parts.append(bytes(data))

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def flush(self) -> None:
        if self._parts:
            self._transport.write(b"".join(self._parts))
            self._parts.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()


class Connection(H11Protocol):
    """Closes connections whose clients neither send nor read.

    The write buffer is bounded: writers wait while `is_full`.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Handlers find this connection in the ASGI scope as `state.connection`."""
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self.is_full = False
        """True while the write buffer is full; writers wait for `on_writable`."""
        self.on_writable: Callable[[], None] | None = None
        """Called when the write buffer has room again."""
        self.read_at = 0.0
        """When bytes were read last: monotonic seconds."""
        self.has_stalled = False
        """It was closed because the client did not read."""
        self._is_lost = False

    @property
    def is_crowded(self) -> bool:
        """Return whether so many connections are open that new requests must be refused.

        At the process's limit of open files, the event loop would reset further connections without an answer.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return len(self.connections) > max(limit // 2, limit - RESERVED_FILES)

    @contextlib.contextmanager
    def one_write(self) -> Iterator[None]:
        """Write the complete response that is sent within this context at once.

        uvicorn writes the head of a response before its body. The head wakes the client, which on a busy machine may
        take the processor from this process before the body is written.
        """
        joined = _JoinedWrites(self.transport)
        self.cycle.transport = joined
        try:
            yield
        finally:
            joined.flush()

    @property
    def write(self) -> Callable[[bytes], None]:
        """Function that writes bytes, at least one, of the body of the response in progress.

        It writes the same bytes as ASGI's `send`, past the middlewares and h11, which would double the cost of a token.
        h11 does not count the bytes of a chunked body, so its state stays valid.
        """
        return self.write_chunk if self.conn.their_http_version == b"1.1" else self._write

    def write_chunk(self, data: bytes) -> None:
        if not self._is_lost:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _write(self, data: bytes) -> None:
        if not self._is_lost:
            self.transport.write(data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        self.read_at = time.monotonic()
        super().data_received(data)
        self._watch_head()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a server may ignore upgrades, and Java's client asks for HTTP/2 with each request."""

    def timeout_keep_alive_handler(self) -> None:
        """Close the idle connection, unless a request has arrived that the event loop has not read yet.

        A late loop runs timers before it reads sockets, and closing a socket with unread bytes resets the connection.
        """
        self.timeout_keep_alive_task = self.loop.call_later(UNREAD_GRACE, super().timeout_keep_alive_handler)

    def _watch_head(self) -> None:
        is_waiting = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if is_waiting and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        elif not is_waiting:
            _cancel(self._head_timer)
            self._head_timer = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.is_full = True
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self._on_stall)

    def _on_stall(self) -> None:
        self.has_stalled = True
        self.transport.abort()

    def resume_writing(self) -> None:
        _cancel(self._stall_timer)
        super().resume_writing()
        self.is_full = False
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)
        self.is_full = False
        self._is_lost = True
        self.app_state.pop("connection", None)  # breaks a reference cycle

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error body, unless an answer has begun. Then close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = invalid("this is not a valid HTTP request").encoded()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close"
        self.transport.write(head % len(body) + b"\r\n\r\n" + body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
