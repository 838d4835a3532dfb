"""uvicorn's HTTP/1.1 connection, with the time limits it lacks. h11, because httptools has no limit on header size."""

import asyncio
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from services.frontend.errors import invalid

HEAD_SECONDS = 30.0
"""A client may take this long to send the head of a request."""
STALL_SECONDS = 30.0
"""A client may leave its answer unread for this long, once buffers are full."""


class Connection(H11Protocol):
    """Ends clients that neither send nor read. An answer's buffer is bounded: whoever writes waits while it is full."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Requests find this connection in their scope as `state.connection`."""
        super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
        self.is_full = False
        """Whoever writes should wait for `on_writable`, or find that the client has left."""
        self.on_writable: Callable[[], None] | None = None
        """Called when an answer's buffer has room again."""
        self._is_lost = False

    def body_writer(self) -> Callable[[bytes], None]:
        """Takes some bytes, not none, of the body of the answer whose head was sent and whose end was not.

        The same bytes on the wire as from ASGI's `send`, of which h11 knows nothing and need not: it keeps no count
        of a chunked body. On the way through middlewares and h11 a token would cost twice as much.
        """
        return self.write_chunk if self.conn.their_http_version == b"1.1" else self._write

    def write_chunk(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def _write(self, data: bytes) -> None:
        if not self._is_lost:
            self.transport.write(data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

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
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._stall_timer)
        super().resume_writing()
        self.is_full = False
        if self.on_writable is not None:
            self.loop.call_soon(self.on_writable)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._head_timer)
        _cancel(self._stall_timer)
        super().connection_lost(exc)
        self.is_full = False
        self._is_lost = True
        self.app_state.pop("connection", None)  # a circle that would keep all of it for a while

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets an error body of OpenAI's shape, then the connection ends."""
        body = invalid("this is not a valid HTTP request").encoded()
        headers: list[tuple[bytes, bytes]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        events: list[Any] = [
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
