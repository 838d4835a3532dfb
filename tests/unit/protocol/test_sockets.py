"""Delivery: a frame that is not delivered raises an error, and one peer does not affect the others."""

import select
import time
from collections.abc import Callable

import pytest
import zmq

from protocol.codec import MAX_MESSAGE_BYTES, encode
from protocol.membership import Heartbeat, LoadFailed
from protocol.transport import HandshakeRefused, PeerGone, PeerSlow, Server
from protocol.transport.endpoint import ENVELOPE_BYTES, HIGH_WATER_MARK
from protocol.transport.server import CHECK
from tests.unit.protocol.peers import PATIENCE, arrived, connect, exchange, new_client
from tests.waiting import wait_until


def flood(send: Callable[[LoadFailed], None], sent: list[bytes]) -> None:
    for i in range(10 * HIGH_WATER_MARK):
        text = LoadFailed(f"{i}".ljust(1000))
        send(text)
        sent.append(encode(text))


def send_for_long(server: Server, peer: bytes) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        server.send(peer, Heartbeat(1, 1))
        server.socket.poll(1)


def test_sending_to_an_unknown_peer_raises_peer_gone(server: Server) -> None:
    with pytest.raises(PeerGone, match=r"peer 6162 is not connected$"):
        server.send(b"ab", Heartbeat(1, 1))


def test_peer_that_left_is_gone_and_removed(server: Server) -> None:
    client, peer = connect(server)
    other, other_peer = connect(server)
    client.close()
    with pytest.raises(PeerGone, match="worker 'test' is not connected"):
        send_for_long(server, peer)
    assert peer not in server.peers
    exchange(server, other, other_peer)


def test_peer_that_does_not_read_is_slow_and_the_others_are_served(server: Server) -> None:
    client, peer = connect(server)
    other, other_peer = connect(server)
    sent: list[bytes] = []
    with pytest.raises(PeerSlow, match="worker 'test' does not read"):
        flood(lambda text: server.send(peer, text), sent)
    assert len(sent) >= HIGH_WATER_MARK // 2  # the socket counts frames that the peer's side has taken late
    exchange(server, other, other_peer)
    assert [client.receive(PATIENCE) for _ in sent] == sent  # all accepted frames are delivered
    server.send(peer, Heartbeat(1, 1))
    assert client.receive(PATIENCE) == encode(Heartbeat(1, 1))


def test_server_that_does_not_read_is_slow(server: Server) -> None:
    client, _ = connect(server)
    with pytest.raises(PeerSlow, match="does not read"):
        flood(lambda text: client.send(text, wait=False), [])


def test_oversized_frame_closes_its_senders_connection_only(server: Server) -> None:
    good, peer = connect(server)
    bad, bad_peer = connect(server)
    bad.socket.send(bytes(MAX_MESSAGE_BYTES + ENVELOPE_BYTES + 1))
    with pytest.raises(PeerGone, match="closed the connection"):
        bad.receive(PATIENCE)
    exchange(server, good, peer)
    with pytest.raises(PeerGone):
        server.send(bad_peer, Heartbeat(1, 1))


def test_large_frame_within_the_limit_arrives(server: Server) -> None:
    client, peer = connect(server)
    frame = bytes(MAX_MESSAGE_BYTES // 4)
    client.socket.send(frame)
    assert arrived(server) == (peer, frame)


@pytest.mark.parametrize("frames", [[b"", encode(Heartbeat(1, 1))], [b"a", b"b", b"c"]])
def test_sender_of_several_frames_is_expelled(server: Server, frames: list[bytes]) -> None:
    client, peer = connect(server)
    bad, bad_peer = connect(server)
    bad.socket.send_multipart(frames)
    bad.send(Heartbeat(1, 1))
    while not server.errors:
        assert server.socket.poll(1000 * PATIENCE)
        assert server.receive() is None
    with pytest.raises(HandshakeRefused, match=f"bad message: {len(frames)} frames"):
        bad.receive(PATIENCE)
    exchange(server, client, peer)
    assert server.errors["worker"] == 1
    assert list(server.peers) == [peer]
    assert server.take_lost() == [bad_peer]
    assert server.take_lost() == []


def test_peer_that_leaves_is_lost_although_nothing_is_sent_to_it(server: Server) -> None:
    (client, peer), lost = connect(server), list[bytes]()
    client.close()

    def is_lost() -> bool:
        assert server.receive() is None
        lost.extend(server.take_lost())
        return lost == [peer]

    wait_until(is_lost)


def test_connection_is_checked_without_a_message_for_its_client(server: Server) -> None:
    client, peer = connect(server)
    server.send_frame(peer, CHECK)
    exchange(server, client, peer)


def test_full_table_has_room_for_a_peer_after_others_have_left(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.transport.server.MAX_PEERS", 3)
    monkeypatch.setattr("protocol.transport.server.SWEEP_INTERVAL", 0.01)
    stays, peer = connect(server)
    for _ in range(20):
        leaver, _ = connect(server)
        leaver.close()
        assert server.sockets[1].poll(1000 * PATIENCE)
        while server.sockets[1].poll(20):
            assert server.receive() is None
    assert len(server.peers) <= 3
    exchange(server, stays, peer)


def test_queued_messages_arrive_although_the_server_closes_at_once(endpoint: str) -> None:
    server = Server(endpoint, {"worker"})
    client, peer = connect(server)
    for i in range(1000):
        server.send(peer, Heartbeat(1, i))
    server.close(1000 * int(PATIENCE))
    assert client.receive(PATIENCE) == encode(Heartbeat(1, 0))
    client.send(Heartbeat(2, 1))  # no error before `receive` has raised it
    assert [client.receive(PATIENCE) for _ in range(999)] == [encode(Heartbeat(1, i)) for i in range(1, 1000)]
    with pytest.raises(PeerGone):
        client.receive(PATIENCE)
    with pytest.raises(PeerGone):
        client.send(Heartbeat(2, 2))


@pytest.mark.parametrize("sends", [False, True], ids=["silent", "sends"])
def test_client_does_not_reconnect_to_a_new_server(endpoint: str, sends: bool) -> None:
    first = Server(endpoint, {"worker"})
    client, _ = connect(first)
    first.close()
    second = Server(endpoint, {"worker"})
    while sends and not second.errors["unknown"]:  # what is written before the loss is seen does not arrive
        client.send(Heartbeat(1, 1))  # before it looks: libzmq has connected again, and the server expects a Hello
        second.socket.poll(100)
        assert second.receive() is None
    with pytest.raises(PeerGone):
        client.receive(PATIENCE)
    again, peer = connect(second)
    exchange(second, again, peer)
    second.close()


def test_messages_to_a_lost_server_do_not_reach_the_next_one(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, context = Server(endpoint, {"worker"}), zmq.Context()
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Context, "instance", lambda: context)
        client, _ = connect(first)
    client.socket.linger = 1000 * int(PATIENCE)
    assert client.receive_now() is None
    first.close()
    assert select.select(client.fds, [], [], PATIENCE)[0]
    client.send(Heartbeat(1, 1))
    client.close()
    second = Server(endpoint, {"worker"})
    context.term()  # waits until closed sockets have sent what they still keep
    connect(second)
    assert not second.errors["unknown"], "a message came before a Hello"
    second.close()


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_connection_lost_before_the_welcome_is_not_restored(endpoint: str, read: bool) -> None:
    """On a second connection, a server that has not noticed the loss would refuse the name of the first one."""
    client = new_client(endpoint)
    client.send_hello("worker", "")
    first = Server(endpoint, {"worker"})
    assert first.socket.poll(1000 * PATIENCE)  # the Hello has arrived
    if read:
        first.socket.recv_multipart()
    first.close()
    second = Server(endpoint, {"worker"})
    with pytest.raises(PeerGone):
        client.receive(PATIENCE)
    again, peer = connect(second)
    exchange(second, again, peer)
    second.close()


def test_second_hello_is_ignored(server: Server) -> None:
    client, peer = connect(server)
    client.send_hello("frontend", "other")
    exchange(server, client, peer)
    assert server.peers[peer].role == "worker"
    assert not server.errors


def test_receive_returns_none_after_its_timeout(server: Server) -> None:
    client, _ = connect(server)
    assert client.receive(0) is None
    assert client.receive(0.02) is None
    assert server.receive() is None


def test_refused_client_that_keeps_sending_is_refused_again(server: Server) -> None:
    client, peer = connect(server)
    server.refuse(peer, "no")
    client.send(Heartbeat(1, 1))
    while server.errors["unknown"] < 1:
        assert server.socket.poll(1000 * PATIENCE)
        assert server.receive() is None
    for text in ("no", "must be a Hello"):
        with pytest.raises(HandshakeRefused, match=text):
            client.receive(PATIENCE)
