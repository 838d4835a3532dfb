"""Bodies of streams that another server than the frontend's own sends."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from services.frontend.http.asgi_sink import FULL_BYTES, ASGISink
from tests.unit.frontend.engine.test_streams import turns


class SlowServer:
    """Sends a message when it is allowed to."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.allowed = asyncio.Semaphore(0)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self.allowed.acquire()
        assert message["more_body"]
        self.bodies.append(message["body"])


async def test_writes_while_a_message_is_sent_are_joined_and_all_are_sent() -> None:
    server = SlowServer()
    server.allowed.release()
    async with ASGISink.open(server.send) as sink:
        sink.write(b"a")
        await turns(5)
        sink.write(b"b")
        await turns(5)
        sink.write(b"c")
        sink.write(b"d")
        server.allowed.release()
        server.allowed.release()
    assert server.bodies == [b"a", b"b", b"cd"]


async def test_a_sink_is_full_until_the_server_has_taken_its_bytes() -> None:
    server = SlowServer()
    called = []
    async with ASGISink.open(server.send) as sink:
        sink.on_writable = lambda: called.append(len(server.bodies))
        sink.write(b"a")
        await turns(5)
        assert not sink.is_full
        sink.write(bytes(FULL_BYTES + 1))
        assert sink.is_full
        server.allowed.release()
        await turns(5)
        assert (sink.is_full, called) == (True, []), "the long one is being sent"
        server.allowed.release()
        await turns(5)
        assert (sink.is_full, called) == (False, [2])


async def test_what_was_written_before_an_error_is_sent() -> None:
    server = SlowServer()
    server.allowed.release()

    async def respond() -> None:
        async with ASGISink.open(server.send) as sink:
            sink.write(b"a")
            raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        await respond()
    assert server.bodies == [b"a"]


async def test_a_cancelled_response_does_not_wait_for_the_server() -> None:
    server = SlowServer()

    async def respond() -> None:
        async with ASGISink.open(server.send) as sink:
            sink.write(b"a")
            await asyncio.Event().wait()

    task = asyncio.create_task(respond())
    await turns(5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.bodies == []
