"""CURVE keys on tcp: only a client with an allowed key and the server's public key can exchange messages."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from zmq.auth import create_certificates

from protocol.codec import encode
from protocol.membership import Heartbeat
from protocol.transport import Client, ClientKeys, HandshakeRefused, HandshakeTimeout, Server, ServerKeys
from tests.unit.protocol.peers import PATIENCE, connect, echoing, exchange


@pytest.fixture
def keys(directory: Path) -> Path:
    """Key pairs of a server and two clients, and the directory `allowed` with the public key of `listed`."""
    for name in ("server", "listed", "unlisted"):
        create_certificates(directory, name)
    (directory / "allowed").mkdir()
    shutil.copy(directory / "listed.key", directory / "allowed")
    return directory


@pytest.fixture
def secure(keys: Path) -> Iterator[Server]:
    server = Server("tcp://127.0.0.1:0", {"worker"}, ServerKeys(keys / "server.key_secret", keys / "allowed"))
    yield server
    server.close()


def client_keys(keys: Path, own: str = "listed", server: str = "server") -> ClientKeys:
    return ClientKeys(keys / f"{own}.key_secret", keys / f"{server}.key")


def test_client_with_an_allowed_key_exchanges_messages(secure: Server, keys: Path) -> None:
    client, peer = connect(secure, keys=client_keys(keys))
    exchange(secure, client, peer)
    client.close()


@pytest.mark.parametrize(
    ("own", "server", "error", "reason"),
    [
        (None, None, HandshakeRefused, "the keys do not match"),
        ("listed", "unlisted", HandshakeTimeout, "may not accept our key"),
        ("unlisted", "server", HandshakeRefused, "not one of the allowed keys"),
    ],
    ids=["no key", "wrong server key", "unlisted key"],
)
def test_wrong_keys_are_refused_with_a_reason_on_both_sides(
    secure: Server,
    keys: Path,
    caplog: pytest.LogCaptureFixture,
    own: str | None,
    server: str,
    error: type[Exception],
    reason: str,
) -> None:
    client = Client(secure.endpoint, client_keys(keys, own, server) if own else None)
    failure: Exception | None = None
    with echoing(secure):
        while reason not in str(failure):
            with pytest.raises((HandshakeRefused, HandshakeTimeout)) as raised:
                client.handshake("worker", "", 0.1)
            failure = raised.value
    assert type(failure) is error
    while not secure.errors["unknown"]:
        secure.socket.poll(20)
        assert secure.receive() is None
    assert not secure.peers
    assert f"a connection to {secure.endpoint} failed" in caplog.text
    client.close()

    good, peer = connect(secure, keys=client_keys(keys))
    exchange(secure, good, peer)
    good.close()


def test_keys_can_be_added_and_removed_while_the_server_runs(secure: Server, keys: Path) -> None:
    shutil.copy(keys / "unlisted.key", keys / "allowed")
    client, peer = connect(secure, keys=client_keys(keys, "unlisted"))
    exchange(secure, client, peer)
    (keys / "allowed" / "unlisted.key").unlink()
    late = Client(secure.endpoint, client_keys(keys, "unlisted"))
    with echoing(secure), pytest.raises(HandshakeRefused, match="not one of the allowed keys"):
        late.handshake("worker", "", PATIENCE)
    exchange(secure, client, peer)  # a connection that exists stays open
    late.close()
    client.close()


def test_missing_directory_of_keys_refuses_every_client(secure: Server, keys: Path) -> None:
    shutil.rmtree(keys / "allowed")
    client = Client(secure.endpoint, client_keys(keys))
    with echoing(secure), pytest.raises(HandshakeRefused, match="not one of the allowed keys"):
        client.handshake("worker", "", PATIENCE)
    (keys / "allowed").mkdir()
    shutil.copy(keys / "listed.key", keys / "allowed")
    good, peer = connect(secure, keys=client_keys(keys))
    exchange(secure, good, peer)
    client.close()
    good.close()


def test_connection_is_encrypted(secure: Server, keys: Path) -> None:
    """A relay records every byte: without keys they contain the text, with keys they do not."""
    assert b"canary-prompt" not in relayed(secure, client_keys(keys))
    plain = Server("tcp://127.0.0.1:0", {"worker"})
    assert b"canary-prompt" in relayed(plain, None)
    plain.close()


def relayed(server: Server, keys: ClientKeys | None) -> bytes:
    """Return the bytes that a client named `canary-prompt` sent for its handshake and a message."""
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(f"tcp://127.0.0.1:{listener.getsockname()[1]}", keys)
        inner, _ = listener.accept()
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        outer = socket.create_connection((host, int(port)))
        pumps = [
            threading.Thread(target=pump, args=(inner, outer, seen)),
            threading.Thread(target=pump, args=(outer, inner, bytearray())),
        ]
        for thread in pumps:
            thread.start()
        with echoing(server):
            client.handshake("worker", "canary-prompt", PATIENCE)
            client.send(Heartbeat(1, 1))
            assert client.receive(PATIENCE) == encode(Heartbeat(1, 1))
        client.close()
        for thread in pumps:
            thread.join()
        inner.close()
        outer.close()
    return bytes(seen)


def pump(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
    while data := source.recv(65536):
        seen += data
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)


def test_bytes_of_another_protocol_never_reach_the_decoder(secure: Server, keys: Path) -> None:
    host, port = secure.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.settimeout(PATIENCE)
        raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(100))
        with suppress(ConnectionResetError):
            while raw.recv(4096):  # libzmq's own greeting, then the end of the connection
                pass
    assert secure.receive() is None
    client, peer = connect(secure, keys=client_keys(keys))
    exchange(secure, client, peer)
    client.close()


@pytest.mark.parametrize(
    ("secret", "allowed", "text"),
    [
        ("missing.key_secret", "allowed", "missing.key_secret"),
        ("server.key", "allowed", "no secret key"),
        ("server.key_secret", "missing", "missing"),
    ],
)
def test_error_names_keys_that_cannot_be_read(keys: Path, secret: str, allowed: str, text: str) -> None:
    with pytest.raises((OSError, ValueError), match=text):
        Server("tcp://127.0.0.1:0", {"worker"}, ServerKeys(keys / secret, keys / allowed))
    with pytest.raises((OSError, ValueError), match="missing"):
        Client("tcp://127.0.0.1:1", ClientKeys(keys / "listed.key_secret", keys / "missing.key"))


def test_keys_on_an_ipc_socket_are_refused(keys: Path) -> None:
    with pytest.raises(ValueError, match="keys are for tcp"):
        Server(f"ipc://{keys}/socket", {"worker"}, ServerKeys(keys / "server.key_secret", keys / "allowed"))
