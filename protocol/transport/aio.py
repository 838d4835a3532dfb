"""The connecting side of a socket, for an asyncio loop (or uvloop)."""

import asyncio

import msgspec

from protocol.security import LOCAL, Security
from protocol.transport.client import Client


class AsyncClient:
    """`Client` with asynchronous `handshake` and `receive`. It belongs to one loop, and only one task may receive."""

    def __init__(self, endpoint: str, security: Security = LOCAL) -> None:
        """Raises: ValueError, if the endpoint is invalid; OSError, if the keys cannot be read."""
        self._client = Client(endpoint, security)
        self._wake: asyncio.Future[None] | None = None

    async def handshake(self, role: str, name: str, timeout: float) -> None:  # noqa: ASYNC109  as in Client
        """Send a `Hello` and wait up to `timeout` seconds for the answer.

        Raises: HandshakeRefused, HandshakeTimeout, PeerGone
        """
        self._client.send_hello(role, name)
        try:
            answer = await asyncio.wait_for(self.receive(), timeout)
        except TimeoutError:
            raise self._client.timeout_error(timeout) from None
        self._client.check_welcome(answer)

    def send(self, message: msgspec.Struct) -> None:
        """Send without waiting. Raises: PeerSlow, if the queue is full; PeerGone, if the server has left."""
        self._client.send(message, wait=False)
        self._on_event()  # sending may consume the edge on the socket's fd that announces an arrival

    @property
    def fds(self) -> tuple[int, int]:
        """File descriptors that the loop watches while a task receives."""
        return self._client.fds

    async def receive(self) -> bytes:
        """Return the next frame. A cancelled call loses no frame.

        Raises: PeerGone, if the server has left and all its frames were read; HandshakeRefused, if it refuses us.
        """
        while (frame := self._client.receive_now()) is None:
            await self._event()
        return frame

    async def _event(self) -> None:
        """Wait until one of the sockets is readable or something was sent."""
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        # Only while a task waits: an fd stays readable until its events are read, so the loop would spin.
        fds = self.fds
        for fd in fds:
            loop.add_reader(fd, self._on_event)
        try:
            await self._wake
        finally:
            for fd in fds:
                loop.remove_reader(fd)

    def _on_event(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def close(self) -> None:
        """Close the sockets. The receiving task must have ended."""
        self._client.close()
