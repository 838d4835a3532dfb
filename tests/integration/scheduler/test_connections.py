"""Frontends and workers that leave, over real sockets: nothing is kept of them."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from protocol.codec import Decoder, encode, pack
from protocol.handshake import Hello
from protocol.membership import EndEpoch, Heartbeat, Ping, Pong, Register
from protocol.requests import AbortRequest, EnginePhase, EngineState, FrontendAlive, RequestOutputs, RoundTrips
from protocol.transport import Client, HandshakeRefused, PeerSlow
from protocol.transport import server as transport
from services.scheduler.io.frontends import FrontendConnections
from services.scheduler.io.workers import WorkerConnections
from tests.waiting import wait_until as until

STATE = EngineState(EnginePhase.READY)
OUTPUTS = RequestOutputs(pack([1]), pack([0]), pack([5]), [])


class DrivenConnections:
    """The scheduler's side, driven as by its service."""

    def __init__(self, directory: Path, kind: type[FrontendConnections | WorkerConnections]) -> None:
        self.endpoint = f"ipc://{directory}/s"
        self.connections: Any = kind(self.endpoint)
        self.received: list[tuple[Any, object]] = []
        self.gone: list[Any] = []

    def pump(self) -> None:
        self.received += self.connections.receive()
        self.gone += self.connections.take_gone()

    def next_frame(self, client: Client) -> bytes:
        """Wait for a frame to a client."""
        frames: list[bytes] = []

        def came() -> bool:
            self.pump()
            frames.extend(frame for frame in [client.receive_now()] if frame is not None)
            return bool(frames)

        until(came)
        return frames[0]


class Frontends(DrivenConnections):
    def connect(self) -> Client:
        client = Client(self.endpoint)
        client.send_hello("frontend", "test")
        client.check_welcome(self.next_frame(client))
        return client

    def has_lost(self, *numbers: int) -> bool:
        self.pump()
        return self.gone == list(numbers)


@pytest.fixture
def frontends(tmp_path: Path) -> Iterator[Frontends]:
    frontends = Frontends(tmp_path, FrontendConnections)
    yield frontends
    frontends.connections.close(0)


def test_a_frontend_that_left_is_found_although_nothing_is_sent_to_it(frontends: Frontends) -> None:
    first, second = frontends.connect(), frontends.connect()
    assert [number for number, message in frontends.received if isinstance(message, Hello)] == [0, 1]
    first.close()
    until(lambda: frontends.has_lost(0))
    assert len(frontends.connections.peers) == 1
    second.send(AbortRequest([7]))
    until(lambda: (frontends.pump(), (1, AbortRequest([7])) in frontends.received)[1])
    second.close()


def test_a_frontend_that_left_is_found_by_its_outputs(frontends: Frontends) -> None:
    frontends.connect().close()

    def sent() -> bool:
        frontends.connections.send(0, OUTPUTS)
        return frontends.connections.take_gone() == [0]

    until(sent)
    frontends.connections.send(0, OUTPUTS)
    frontends.connections.send_if_connected(0, STATE)
    frontends.connections.count_error(0, ValueError("late"))
    assert frontends.connections.take_gone() == [], "once only"


def test_frontends_that_left_use_up_no_room(frontends: Frontends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_PEERS", 2)
    monkeypatch.setattr(transport, "SWEEP_SECONDS", 0.1)
    for number in range(4):
        frontends.connect().close()
        until(lambda n=number: frontends.has_lost(*range(n + 1)))  # type: ignore[misc]
        assert not frontends.connections.peers


def test_a_lease_ends_in_silence_and_any_message_renews_it(frontends: Frontends) -> None:
    """The first frontend has never sent a sign of life, and has no lease."""
    _, silent, renewed = clients = [frontends.connect() for _ in range(3)]
    for client in (silent, renewed):
        client.send(FrontendAlive())
    until(lambda: (frontends.pump(), len(frontends.received) == 5)[1])
    before = time.monotonic()
    renewed.send(AbortRequest([7]))
    until(lambda: (frontends.pump(), len(frontends.received) == 6)[1])
    frontends.connections.end_leases(before)
    assert frontends.has_lost(1)
    for client in clients:
        client.close()


def test_a_state_carries_the_lease_and_the_answer_to_the_last_sign_of_life(frontends: Frontends) -> None:
    clients = frontends.connect(), frontends.connect()
    clients[1].send(FrontendAlive(5))
    until(lambda: (frontends.pump(), len(frontends.received) == 3)[1])
    frontends.connections.send_state_to_all(replace(STATE, round_trips=RoundTrips(0, [0.5])))
    decoder: Decoder[EngineState] = Decoder(EngineState)
    for client, lease, sign in ((clients[0], 1, 0), (clients[1], 2, 5)):
        state = decoder.decode(frontends.next_frame(client))
        assert (state.lease, state.round_trips) == (lease, RoundTrips(sign, [0.5]))
        client.close()


def test_a_frontend_that_does_not_read_is_turned_away(frontends: Frontends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state may be lost, outputs may not."""
    client, connections = frontends.connect(), frontends.connections
    send = connections.server.send

    def send_if_not_large(peer: bytes, message: object) -> None:
        if isinstance(message, EngineState | RequestOutputs):
            raise PeerSlow("its queue is full")
        send(peer, message)

    monkeypatch.setattr(connections.server, "send", send_if_not_large)
    connections.send_state(0, STATE)
    assert connections.take_gone() == []
    connections.send(0, OUTPUTS)
    assert connections.take_gone() == [0]
    with pytest.raises(HandshakeRefused, match="did not read"):
        until(lambda: client.receive_now() is not None)
    client.close()


class Workers(DrivenConnections):
    def connect(self, name: str) -> tuple[Client, Client]:
        """The two connections of a worker."""
        clients = Client(self.endpoint), Client(self.endpoint)
        for client, role in zip(clients, ("worker", "worker-results"), strict=True):
            client.send_hello(role, name)
            client.check_welcome(self.next_frame(client))
        return clients

    def register(self, name: str) -> tuple[bytes, tuple[Client, Client]]:
        """A worker's identity and its connections, both of which it has used."""
        clients, before = self.connect(name), len(self.received)
        clients[0].send(Register("sim", "m"))
        clients[1].send(Heartbeat(0, 0))
        until(lambda: (self.pump(), len(self.received) == before + 2)[1])
        peers = {peer for peer, _ in self.received[before:]}
        assert len(peers) == 1, "both connections belong to one worker"
        return peers.pop(), clients


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path, WorkerConnections)
    yield workers
    workers.connections.close(0)


def close(clients: tuple[Client, Client]) -> None:
    for client in clients:
        client.close()


def test_a_worker_is_gone_when_either_connection_breaks(workers: Workers) -> None:
    for index in (0, 1):
        peer, clients = workers.register(f"host:{index}")
        clients[index].close()
        until(lambda p=peer: (workers.pump(), p in workers.gone)[1])  # type: ignore[misc]
        clients[1 - index].close()
    until(lambda: (workers.pump(), not workers.connections.by_name)[1])


def test_a_worker_that_was_refused_is_turned_away_and_dropped(workers: Workers) -> None:
    peer, clients = workers.register("host:1")
    workers.connections.refuse(peer, "another model")
    assert not workers.connections.by_name
    with pytest.raises(HandshakeRefused, match="another model"):
        until(lambda: clients[0].receive_now() is not None)
    close(clients)


@pytest.mark.parametrize("how", ["refused", "registered", "connected"])
def test_workers_that_left_use_up_no_room(workers: Workers, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A worker has two connections: room for four is room for two workers."""
    monkeypatch.setattr(transport, "MAX_PEERS", 4)
    monkeypatch.setattr(transport, "SWEEP_SECONDS", 0.1)
    for number in range(5):
        if how == "connected":
            clients = workers.connect(f"host:{number}")
        else:
            peer, clients = workers.register(f"host:{number}")
            if how == "refused":
                workers.connections.refuse(peer, "another model")
        close(clients)
        until(lambda: (workers.pump(), workers.connections.server.sweeps)[1])
        until(lambda: (workers.pump(), not workers.connections.server.sweeps)[1])
        assert not workers.connections.by_name


def test_the_connection_for_results_is_not_flooded_while_workers_are_probed(workers: Workers) -> None:
    """A worker reads it ten times a second, and the end of its epoch must not wait behind checks."""
    peer, clients = workers.register("host:1")
    _, others = workers.register("host:2")
    close(others)
    until(lambda: (workers.pump(), workers.connections.server.sweeps)[1])
    until(lambda: (workers.pump(), not workers.connections.server.sweeps)[1])
    workers.connections.send(peer, EndEpoch(1, "a rank was lost"), everywhere=True)
    frames: list[bytes] = []

    def ended() -> bool:
        frames.extend(frame for frame in [clients[1].receive_now()] if frame is not None)
        return bool(frames) and frames[-1] == encode(EndEpoch(1, "a rank was lost"))

    until(ended)
    assert len(frames) == 1, "checks of the connection are no messages"
    close(clients)


def test_name_of_a_living_connection_cannot_be_taken_over(workers: Workers) -> None:
    peer, clients = workers.register("host:1")
    for role in ("worker", "worker-results"):
        thief = Client(workers.endpoint)
        thief.send_hello(role, "host:1")
        with pytest.raises(HandshakeRefused, match="'host:1' belongs to another connection"):
            until(lambda c=thief: (workers.pump(), c.receive_now(), False)[2])  # type: ignore[misc]
        thief.send(Heartbeat(0, 0))
        thief.close()
    before = len(workers.received)
    clients[0].send(Register("sim", "m"))
    clients[1].send(Heartbeat(0, 0))
    until(lambda: (workers.pump(), len(workers.received) == before + 2)[1])
    assert {sender for sender, _ in workers.received[before:]} == {peer}
    assert workers.gone == []
    workers.connections.send(peer, EndEpoch(1, "a rank was lost"), everywhere=True)
    for client in clients:
        until(lambda c=client: c.receive_now() is not None)  # type: ignore[misc]
    close(clients)


def test_name_is_free_after_its_connection_has_left(workers: Workers) -> None:
    first, clients = workers.register("host:1")
    close(clients)
    until(lambda: (workers.pump(), first in workers.gone)[1])
    second, clients = workers.register("host:1")
    assert second != first
    close(clients)


def test_signs_of_life_measure_the_clock_of_a_rank(workers: Workers) -> None:
    """A spare gets them on its connection for results alone."""
    rank, clients = workers.register("host:1")
    spare, others = workers.register("host:2")
    decoder: Decoder[Ping] = Decoder(Ping)
    workers.connections.beat(7, [rank])
    pings = [decoder.decode(workers.next_frame(client)) for client in (*clients, others[1])]
    assert [ping.number for ping in pings] == [7, 7, 7]
    assert others[0].receive_now() is None
    sent = pings[0].sent
    clients[0].send(pong := Pong(sent, sent + 1e6, sent + 1e6, 7))
    until(lambda: (workers.pump(), (rank, pong) in workers.received)[1])
    assert 1e6 - 1000 < workers.connections.clock_offset(rank) < 1e6
    assert workers.connections.clock_offset(spare) == 0.0
    close(clients)
    close(others)


def test_connections_for_results_whose_worker_was_lost_are_ignored(workers: Workers) -> None:
    """They are not refused, as their workers connect again."""
    orphans = []
    for _ in range(2):
        orphans.append(client := Client(workers.endpoint))
        client.send_hello("worker-results", "host:1")
        client.check_welcome(workers.next_frame(client))
        client.send(Heartbeat(0, 0))
    worker, clients = workers.register("host:1")
    assert {sender for sender, _ in workers.received} == {worker}
    for client in orphans:
        assert client.receive_now() is None
        client.close()
    close(clients)
