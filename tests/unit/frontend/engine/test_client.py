"""The client of the engine against a real socket."""

import asyncio
from pathlib import Path

import pytest

from protocol.codec import Decoder, ProtocolError
from protocol.requests import ClientMessage, EnginePhase, EngineState, Finish, FinishReason, GenerateRequest
from protocol.sampling import SamplingParams
from protocol.transport import HandshakeRefused, Server
from services.frontend.engine.client import EngineClient, RequestContext
from services.frontend.engine.streams import FlushQueue, ResponseStream
from tests.unit.frontend.engine.test_streams import RecordingStream


@pytest.mark.parametrize(("theirs", "fits"), [("same", True), ("", True), ("other", False)])
async def test_scheduler_with_another_tokenizer_is_refused(tmp_path: Path, theirs: str, fits: bool) -> None:
    server = Server(f"ipc://{tmp_path}/c", {"frontend"})
    client = EngineClient(server.endpoint, 1, 10.0, 300.0, 600.0, tokenizer="same")
    running = asyncio.create_task(client.run())
    while not running.done() and client.state.phase is not EnginePhase.READY:
        if (received := server.receive()) is not None:
            server.send(received[0], EngineState(EnginePhase.READY, tokenizer=theirs))
        await asyncio.sleep(0.01)
    if fits:
        assert client.ready
        running.cancel()
    else:
        with pytest.raises(
            HandshakeRefused, match=r"tokenizer mismatch: .* digest same, .* other; give both the same"
        ):
            await running
    await asyncio.wait({running})
    server.close()


async def test_a_frontend_whose_lease_has_ended_connects_again(tmp_path: Path) -> None:
    """Its requests have ended with the lease, so it must submit them on a new connection."""
    server = Server(f"ipc://{tmp_path}/c", {"frontend"})
    client = EngineClient(server.endpoint, 1, 10.0, 300.0, 600.0)
    running = asyncio.create_task(client.run())
    peers: list[bytes] = []
    while len(peers) < 2:
        if (received := server.receive()) is not None:
            peers.append(received[0])
            for lease in (1, 1, 2):
                server.send(received[0], EngineState(EnginePhase.READY, lease=lease))
        await asyncio.sleep(0.01)
    assert peers[0] != peers[1]
    running.cancel()
    await asyncio.wait({running})
    server.close()


async def test_a_message_that_the_scheduler_cannot_read_costs_its_request_and_not_the_frontend(
    tmp_path: Path,
) -> None:
    """The scheduler expels the frontend at each submission of a request; the frontend connects again without it."""
    server, decoder = Server(f"ipc://{tmp_path}/c", {"frontend"}), Decoder(ClientMessage)
    client = EngineClient(server.endpoint, 1, 10.0, 300.0, 600.0)
    running = asyncio.create_task(client.run())
    stream = RecordingStream(ResponseStream(FlushQueue()))
    peers, submissions = set[bytes](), 0
    while stream.end is None or len(peers) < 4:
        for peer, message in server.messages(decoder):
            if peer not in peers:
                peers.add(peer)
                server.send(peer, EngineState(EnginePhase.READY, incarnation=7, lease=len(peers)))
            elif isinstance(message, GenerateRequest):
                submissions += 1
                server.expel(peer, ProtocolError("a byte is wrong"))
        if client.ready and not submissions and not client.num_open:
            client.submit(stream, [1, 2], SamplingParams(8, seed=1), RequestContext())
        await asyncio.sleep(0.01)
    assert submissions == 3
    assert isinstance(stream.end, Finish)
    assert stream.end.reason is FinishReason.ERROR
    assert "could not read it" in stream.end.message
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})
    server.close()
