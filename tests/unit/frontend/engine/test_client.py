"""The client of the engine against a real socket."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from protocol.codec import Decoder, ProtocolError
from protocol.requests import (
    AbortRequest,
    ClientMessage,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    GenerateRequest,
)
from protocol.sampling import SamplingParams
from protocol.transport import Server
from services.frontend.engine import connection as connection_module
from services.frontend.engine import engines as engines_module
from services.frontend.engine.addresses import numbered
from services.frontend.engine.client import NO_PROMPT, EngineClient
from services.frontend.engine.streams import FlushQueue, ResponseStream
from tests.unit.frontend.engine.test_engines import ScriptedEngine, connected
from tests.unit.frontend.engine.test_streams import RecordingStream
from tests.waiting import wait_until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with closing(Server(f"ipc://{tmp_path}/c", {"frontend"})) as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[EngineClient]:
    """A client that runs."""
    client = EngineClient(numbered([server.endpoint]), 1, 10.0, 300.0, 600.0)
    async with connected(client):
        yield client


async def test_why_no_scheduler_answers_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_module, "HANDSHAKE_TIMEOUT", 0.01)
    client = EngineClient(numbered([f"ipc://{tmp_path}/c"]), 1, 10.0, 300.0, 600.0)
    with caplog.at_level("INFO"):
        async with connected(client):
            why = f"no answer from ipc://{tmp_path}/c within 0.01 s; trying again"
            await asyncio.to_thread(wait_until, lambda: why in caplog.text)


async def test_a_bug_in_the_checks_ends_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checks it would send no signs of life, and no request would end."""
    client = EngineClient(numbered([f"ipc://{tmp_path}/c"]), 1, 10.0, 300.0, 600.0)
    monkeypatch.setattr(client.ledger, "stuck", None)
    with pytest.raises(TypeError, match="not callable"):
        await asyncio.wait_for(client.run(), 20)


async def test_a_frontend_whose_lease_has_ended_connects_again(server: Server, client: EngineClient) -> None:
    """Its requests have ended with the lease, so it must submit them on a new connection."""
    peers: list[bytes] = []
    while len(peers) < 2:
        if (received := server.receive()) is not None:
            peers.append(received[0])
            for lease in (1, 1, 2):
                server.send(received[0], EngineState(EnginePhase.READY, lease=lease))
        await asyncio.sleep(0.01)
    assert peers[0] != peers[1]


async def test_messages_behind_one_that_cannot_be_read_are_not_handled(server: Server, client: EngineClient) -> None:
    """The connection is dropped with the first bad message: a second one would double the pause again."""
    [engine], peers = client.engines.values(), list[bytes]()
    before = engine.connection.pause
    ready, bad = EngineState(EnginePhase.READY, incarnation=7, lease=1), AbortRequest([1], 7)
    while not (client.recoveries and client.ready):
        if (received := server.receive()) is not None and received[0] not in peers:
            peers.append(received[0])
            for message in (ready, bad, bad, ready) if len(peers) == 1 else (ready,):
                server.send(received[0], message)
        await asyncio.sleep(0.01)
    assert len(peers) == 2
    assert engine.connection.pause == 2 * before


@pytest.mark.parametrize(("most", "factor"), [(connection_module.REFUSED_PAUSE, 8), (0.0, 1)], ids=["short", "long"])
async def test_a_scheduler_that_always_sends_bad_messages_is_connected_to_ever_later(
    server: Server, client: EngineClient, monkeypatch: pytest.MonkeyPatch, most: float, factor: int
) -> None:
    """Up to a limit, and at once again if the connection has lasted for longer than that, or for another scheduler."""
    monkeypatch.setattr(connection_module, "REFUSED_PAUSE", most)
    [engine], peers = client.engines.values(), set[bytes]()
    before = engine.connection.pause
    while len(peers) < 4:
        if (received := server.receive()) is not None and received[0] not in peers:
            pause = engine.connection.pause
            peers.add(received[0])
            server.send(received[0], EngineState(EnginePhase.READY, incarnation=7, lease=1))
            server.send(received[0], AbortRequest([1], 7))
        await asyncio.sleep(0.01)
    assert pause == factor * before
    for _ in range(9):
        engine.connection.on_bad_message(ProtocolError("wrong"))
    for incarnation, pause in ((7, most), (8, before)):
        engine.connection.on_state(EngineState(EnginePhase.READY, incarnation=incarnation, lease=1))
        assert engine.connection.pause == pause


async def test_a_message_that_the_scheduler_cannot_read_costs_its_request_and_not_the_frontend(
    server: Server, client: EngineClient
) -> None:
    """The scheduler expels the frontend at each submission of a request; the frontend connects again without it."""
    stream, decoder = RecordingStream(ResponseStream(FlushQueue())), Decoder(ClientMessage)
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
            client.submit(stream, [1, 2], SamplingParams(8, seed=1), NO_PROMPT)
        await asyncio.sleep(0.01)
    assert submissions == 3
    assert isinstance(stream.end, Finish)
    assert stream.end.reason is FinishReason.ERROR
    assert "could not read it" in stream.end.message


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test sends the signs of life and checks for their answers, so that their order is fixed."""
    monkeypatch.setattr(engines_module, "CHECK_INTERVAL", 3600.0)


async def exchange_sign(client: EngineClient, scheduler: ScriptedEngine) -> None:
    """Send a sign of life, wait for the state that the scheduler sends after it, and check."""
    number, connection = scheduler.num_signs + 1, client.engines["0"].connection
    connection.send_sign()
    while client.state.stats.get("num_signs") != number:
        scheduler.turn()
        await asyncio.sleep(0)
    connection.check(0.0)


async def until_ready(client: EngineClient, scheduler: ScriptedEngine) -> None:
    while not client.ready:
        scheduler.turn()
        await asyncio.sleep(0)


@pytest.mark.usefixtures("no_clock")
async def test_a_scheduler_that_hears_nothing_is_left_although_it_sends_states(tmp_path: Path) -> None:
    scheduler = ScriptedEngine(f"ipc://{tmp_path}/c", 7)
    client = EngineClient(numbered([scheduler.server.endpoint]), 1, 5.0, 300.0, 600.0)
    async with connected(client):
        await until_ready(client, scheduler)
        for _ in range(20):
            await exchange_sign(client, scheduler)
        scheduler.deaf_after = scheduler.num_signs
        for _ in range(6):
            await exchange_sign(client, scheduler)
            assert client.ready
        await exchange_sign(client, scheduler)
        assert not client.ready, "the seventh sign without an answer is the last one"
        assert client.state.phase is EnginePhase.RECOVERING
        scheduler.deaf_after = None
        await until_ready(client, scheduler)
        assert len(scheduler.peers) == 2
    scheduler.close()


@pytest.mark.usefixtures("no_clock")
async def test_an_engine_with_a_rank_that_does_not_answer_is_not_ready(tmp_path: Path) -> None:
    scheduler = ScriptedEngine(f"ipc://{tmp_path}/c", 7)
    client = EngineClient(numbered([scheduler.server.endpoint]), 1, 5.0, 300.0, 600.0)
    async with connected(client):
        await until_ready(client, scheduler)
        for unanswered, ready in (([5.0, 0.0], True), ([5.0, 6.0], False), ([0.0, 0.0], True)):
            scheduler.unanswered = unanswered
            await exchange_sign(client, scheduler)
            assert client.ready is ready
            if not ready:
                assert client.state.detail == "rank 1 does not answer the scheduler"
                client.check_ready()  # requests are taken, and wait
    scheduler.close()
