"""The connecting side of a socket, for an asyncio loop (or uvloop)."""

import asyncio
from collections.abc import Callable

import msgspec

from protocol.security import LOCAL, Security
from protocol.transport.client import Client
from protocol.transport.errors import Expelled, HandshakeRefused

MAX_FRAMES = 64
"""Frames handled before other callbacks of the event loop run."""


class AsyncClient:
    """`Client` for an event loop, to which it belongs.

    The callback of the loop that notices a frame also handles it: waking a task for each one would cost more than the
    frame of a step.
    """

    def __init__(self, endpoint: str, security: Security = LOCAL) -> None:
        """Raises: as `Client`."""
        self._client = Client(endpoint, security)
        self._end: asyncio.Future[None] | None = None
        """Set while `read` runs."""
        self._on_frame: Callable[[bytes], None] = self._on_answer
        self._is_accepted = False

    async def handshake(self, role: str, name: str, timeout: float) -> None:  # noqa: ASYNC109  as in Client
        """Do what `Client.handshake` does."""
        self._client.send_hello(role, name)
        try:
            await asyncio.wait_for(self.read(self._on_answer), timeout)
        except TimeoutError:
            raise self._client.timeout_error(timeout) from None

    def _on_answer(self, frame: bytes) -> None:
        self._client.check_welcome(frame)
        self._is_accepted = True
        self.stop()

    def send(self, message: msgspec.Struct) -> None:
        """Send without waiting. Raises: PeerSlow, if the queue is full; PeerGone, if the server has left."""
        self._client.send(message, wait=False)
        if self._end is not None:  # sending may consume the edge on the socket's fd that announces an arrival
            self._end.get_loop().call_soon(self._drain)

    async def read(self, on_frame: Callable[[bytes], None]) -> None:
        """Pass frames to `on_frame` as they arrive, until `stop`. A cancelled call loses no frame.

        Raises: PeerGone, if the server has left and all its frames were read; Expelled, if it has ended the connection;
            what `on_frame` raises.
        """
        loop = asyncio.get_running_loop()
        self._end, self._on_frame = end, _ = loop.create_future(), on_frame
        fds = self._client.fds
        for fd in fds:  # only meanwhile: an fd is readable until its events are read, so the loop would spin
            loop.add_reader(fd, self._drain)
        self._drain()
        try:
            await end
        finally:
            self._end = None
            for fd in fds:
                loop.remove_reader(fd)

    def stop(self) -> None:
        """End `read`; no further frame is passed."""
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def _drain(self) -> None:
        end = self._end
        try:
            for _ in range(MAX_FRAMES):
                if end is None or end.done() or (frame := self._receive()) is None:
                    return
                self._on_frame(frame)
        except Exception as error:
            if end is not None and not end.done():
                end.set_exception(error)
            return
        if end is not None:
            end.get_loop().call_soon(self._drain)

    def _receive(self) -> bytes | None:
        try:
            return self._client.receive_now()
        except HandshakeRefused as error:
            if not self._is_accepted:
                raise
            raise Expelled(str(error)) from None

    def close(self) -> None:
        """Close the sockets. `read` must have ended."""
        self._client.close()
