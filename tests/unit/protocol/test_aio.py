"""The asyncio client, on asyncio's own loop and on uvloop."""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from protocol.codec import encode
from protocol.membership import Heartbeat, LoadFailed
from protocol.transport import PeerGone, PeerSlow, Server
from protocol.transport.aio import AsyncClient
from protocol.transport.endpoint import HIGH_WATER_MARK
from tests.unit.protocol.peers import PATIENCE, echoing

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    def run(test: Callable[[], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(asyncio.wait_for(test(), PATIENCE))

    return run


class Reading(AsyncClient):
    """Client whose frames are read one by one."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._frames: deque[bytes] = deque()

    def _take(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.stop()

    async def receive(self) -> bytes:
        if not self._frames:
            await self.read(self._take)
        return self._frames.popleft()


async def connect(endpoint: str) -> Reading:
    client = Reading(endpoint)
    await client.handshake("frontend", "test", PATIENCE)
    return client


def test_no_frame_is_lost_while_both_sides_send(server: Server, run: Run) -> None:
    """Sending may consume the event of an arrival; without a check the last answers would never be read."""
    count = 3000

    async def test() -> None:
        client = await connect(server.endpoint)

        received: list[bytes] = []

        def take(frame: bytes) -> None:
            received.append(frame)
            if len(received) == count:
                client.stop()

        receiver = asyncio.create_task(client.read(take))
        for i in range(count):
            client.send(Heartbeat(1, i))
            if i % 7 == 0:
                await asyncio.sleep(0)
        await receiver
        assert received == [encode(Heartbeat(1, i)) for i in range(count)]
        client.close()

    with echoing(server):
        run(test)


def test_cancelled_receive_loses_no_frame(server: Server, run: Run) -> None:
    async def test() -> None:
        client = await connect(server.endpoint)
        for i in range(200):
            receiver = asyncio.create_task(client.receive())
            await asyncio.sleep(0)
            client.send(Heartbeat(1, i))
            if i % 2:
                await asyncio.sleep(0.001)
            receiver.cancel()
            done = (await asyncio.gather(receiver, return_exceptions=True))[0]
            frame = await client.receive() if isinstance(done, asyncio.CancelledError) else done
            assert frame == encode(Heartbeat(1, i))
        client.close()

    with echoing(server):
        run(test)


def test_unread_frame_does_not_spin_the_loop(server: Server, run: Run) -> None:
    async def test() -> None:
        before = {*os.listdir("/proc/self/fd")}
        client = await connect(server.endpoint)
        client.send(Heartbeat(1, 1))
        await client.receive()
        client.send(Heartbeat(1, 2))  # the answer stays unread
        loop = asyncio.get_running_loop()
        assert not any(loop.remove_reader(int(fd)) for fd in {*os.listdir("/proc/self/fd")} - before)
        assert await client.receive() == encode(Heartbeat(1, 2))
        client.close()

    with echoing(server):
        run(test)


def test_end_of_the_server_wakes_the_receiver(endpoint: str, run: Run) -> None:
    async def test() -> None:
        server = Server(endpoint, {"frontend"})
        with echoing(server):
            client = await connect(endpoint)
        receiver = asyncio.create_task(client.receive())
        await asyncio.sleep(0)
        server.close()
        with pytest.raises(PeerGone, match="closed the connection"):
            await receiver
        with pytest.raises(PeerGone):
            client.send(Heartbeat(1, 1))
        client.close()

    run(test)


def flood(client: AsyncClient) -> None:
    text = LoadFailed("x" * 1000)
    for _ in range(10 * HIGH_WATER_MARK):
        client.send(text)


def test_server_that_does_not_read_never_blocks_the_loop(server: Server, run: Run) -> None:
    async def test() -> None:
        with echoing(server):
            client = await connect(server.endpoint)
        with pytest.raises(PeerSlow):
            flood(client)
        client.close()

    run(test)
