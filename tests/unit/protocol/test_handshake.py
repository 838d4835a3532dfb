"""The handshake: accepted and refused peers, and the reasons of a refusal."""

import logging

import pytest
import zmq

from protocol.codec import encode
from protocol.handshake import PROBE, PROTOCOL_VERSION, Hello, Refused, Welcome
from protocol.membership import Heartbeat
from protocol.transport import HandshakeRefused, HandshakeTimeout, Server
from tests.unit.protocol.peers import PATIENCE, arrived, connect, echoing, exchange, new_client, raw_dealer


@pytest.mark.parametrize("version", [(4, 5), (2, 6)])
def test_another_major_version_is_refused_with_both_versions(
    server: Server, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    monkeypatch.setattr("protocol.transport.client.PROTOCOL_VERSION", version)
    client = new_client(server.endpoint)
    ours = "{}.{}".format(*PROTOCOL_VERSION)
    with echoing(server), pytest.raises(HandshakeRefused, match=r"{}\.{}, this service has {}".format(*version, ours)):
        client.handshake("worker", "stranger", PATIENCE)
    assert not server.peers


def test_another_minor_version_is_accepted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.transport.client.PROTOCOL_VERSION", (PROTOCOL_VERSION[0], 99))
    client = new_client(server.endpoint)
    with echoing(server):
        client.handshake("worker", "newer", PATIENCE)


def test_unexpected_role_is_refused_with_the_expected_ones(server: Server) -> None:
    client = new_client(server.endpoint)
    reason = "'bench' may not connect here, only frontend or worker"
    with echoing(server), pytest.raises(HandshakeRefused, match=reason):
        client.handshake("bench", "", PATIENCE)


@pytest.mark.parametrize("frame", [encode(Heartbeat(1, 2)), b"", b"GET / HTTP/1.1", encode(Welcome(1, 0)), bytes(5000)])
def test_peer_without_a_handshake_is_refused_and_its_frames_are_dropped(server: Server, frame: bytes) -> None:
    good, peer = connect(server)
    with raw_dealer(server.endpoint) as stranger:
        stranger.send(frame)
        stranger.send(frame)
        while server.errors["unknown"] < 2:
            assert server.socket.poll(1000 * PATIENCE)
            assert server.receive() is None
        assert stranger.poll(1000 * PATIENCE)
        assert b"must be a Hello" in stranger.recv()
    exchange(server, good, peer)


def test_peer_above_the_maximum_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.transport.server.MAX_PEERS", 1)
    connect(server)
    second = new_client(server.endpoint)
    with echoing(server), pytest.raises(HandshakeRefused, match="1 peers are connected already"):
        second.handshake("worker", "", PATIENCE)


def test_handshake_times_out(endpoint: str) -> None:
    client = new_client(endpoint)
    with pytest.raises(HandshakeTimeout, match=r"no answer from ipc://.* within 0\.05 s"):
        client.handshake("worker", "", 0.05)


def test_server_may_start_after_its_client(endpoint: str) -> None:
    client = new_client(endpoint)
    client.send(Hello(*PROTOCOL_VERSION, "worker", "early"))
    server = Server(endpoint, {"worker"})
    _, hello = arrived(server)
    assert hello == Hello(*PROTOCOL_VERSION, "worker", "early")
    answer = client.receive(PATIENCE)
    assert answer is not None
    client.check_welcome(answer)
    server.close()


def test_server_with_another_protocol_is_refused(endpoint: str) -> None:
    with zmq.Context.instance().socket(zmq.ROUTER) as other:
        other.linger = 0
        other.bind(endpoint)
        client = new_client(endpoint)
        client.send(Hello(*PROTOCOL_VERSION, "worker", ""))
        peer, _ = other.recv_multipart()
        other.send_multipart((peer, b"220 smtp.example.org"))
        answer = client.receive(PATIENCE)
        assert answer is not None
        with pytest.raises(HandshakeRefused, match="has another protocol"):
            client.check_welcome(answer)


def test_refusal_with_a_long_reason_is_recognised(server: Server) -> None:
    client, peer = connect(server)
    server.send(peer, Refused("x" * 5000))
    with pytest.raises(HandshakeRefused, match=r"^x+$"):
        client.receive(PATIENCE)


def test_name_of_a_peer_is_one_line_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = new_client(server.endpoint)
    client.send(Hello(*PROTOCOL_VERSION, "worker", "a\nERROR all is lost"))
    peer, _ = arrived(server)
    with caplog.at_level(logging.WARNING):
        server.count_error(peer, ValueError("bad"))
    assert caplog.messages == [r"bad message from worker 'a\nERROR all is lost': bad (1 so far)"]


def test_many_errors_are_all_counted_and_few_are_logged(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    _, peer = connect(server)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            server.count_error(peer, ValueError("bad"))
    assert server.errors["worker"] == 1000
    assert len(caplog.messages) == 10


def test_probe_is_answered_and_is_no_peer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.transport.server.MAX_PEERS", 0)
    client = new_client(server.endpoint)
    with echoing(server):
        client.handshake(PROBE, "health check", PATIENCE)
    assert not server.peers
    assert not server.errors
