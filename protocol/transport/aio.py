"""The side that connects, for an asyncio loop (uvloop too)."""

import asyncio

import msgspec

from protocol.transport.client import Client
from protocol.transport.curve import ClientKeys


class AsyncClient:
    """`Client` whose `handshake` and `receive` are awaited. Belongs to one loop; one task receives."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        """Raises: ValueError, for an endpoint that cannot be dialled; OSError, for keys that cannot be read"""
        self._client = Client(endpoint, keys)
        self._wake: asyncio.Future[None] | None = None

    async def handshake(self, role: str, name: str, timeout: float) -> None:  # noqa: ASYNC109  as in Client
        """Greets the server and waits up to `timeout` seconds for its answer.

        Raises: HandshakeRefused, HandshakeTimeout
        """
        self._client.greet(role, name)
        try:
            answer = await asyncio.wait_for(self.receive(), timeout)
        except TimeoutError:
            raise self._client.unanswered(timeout) from None
        self._client.accept(answer)

    def send(self, message: msgspec.Struct) -> None:
        """Never waits. Raises: PeerSlow, when the queue is full; PeerGone, when the server has left"""
        self._client.send(message, wait=False)
        self._on_event()  # sending may swallow the sign that something has arrived

    async def receive(self) -> bytes:
        """The next frame. A cancelled call loses none.

        Raises: PeerGone, when the server left and all it sent was read; HandshakeRefused, when it turned us away
        """
        while (frame := self._client.take()) is None:
            await self._event()
        return frame

    async def _event(self) -> None:
        """Waits until one of the sockets has something to say, or something was sent."""
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        # Only while somebody waits: the signs stay up until they are read, which would spin the loop.
        fds = self._client.fds
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
        """After the receiving task has ended."""
        self._client.close()
