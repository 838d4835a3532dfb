"""CURVE keys on tcp: only a client with a key of the right role and the server's public key can exchange messages."""

import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.auth import create_certificates, load_certificate

from protocol.codec import encode
from protocol.handshake import PROBE, PROTOCOL_VERSION, Hello, Refused
from protocol.security import Security
from protocol.transport import Client, HandshakeRefused, HandshakeTimeout, Server
from services.cli.settings import ConfigurationError
from services.cli.transport_keys import make_keys
from tests.unit.protocol.peers import PATIENCE, connect, echoing, exchange, new_client


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of `runahead keys`, and a worker's directory whose key nobody allows."""
    made = tmp_path_factory.mktemp("keys")
    make_keys(made)
    shutil.copytree(made / "worker", made / "unlisted")
    (made / "unlisted" / "worker.key_secret").unlink()
    create_certificates(made / "unlisted", "unlisted")
    (made / "unlisted" / "unlisted.key_secret").chmod(0o600)
    return made


@pytest.fixture
def keys(made: Path, directory: Path) -> Path:
    shutil.copytree(made, directory / "keys")
    return directory / "keys"


@pytest.fixture
def secure(keys: Path) -> Iterator[Server]:
    server = Server("tcp://127.0.0.1:0", {"worker", "worker-results"}, Security(keys / "scheduler"))
    yield server
    server.close()


def allow(keys: Path, name: str) -> Path:
    """Let the scheduler accept the unlisted key under another name."""
    return Path(shutil.copy(keys / "unlisted" / "unlisted.key", keys / "scheduler" / name))


def test_client_with_an_allowed_key_exchanges_messages(secure: Server, keys: Path) -> None:
    for role in ("worker", "worker-results"):
        client, peer = connect(secure, role, Security(keys / "worker"))
        exchange(secure, client, peer)


@pytest.mark.parametrize(
    ("own", "change", "error", "reason"),
    [
        (None, "", HandshakeRefused, "the keys do not match"),
        ("worker", "server key", HandshakeTimeout, "may not accept our key"),
        ("unlisted", "", HandshakeRefused, "not one of the allowed keys"),
        ("frontend", "", HandshakeRefused, "not one of the allowed keys"),
        ("scheduler", "", HandshakeRefused, "this is the key of a scheduler"),
    ],
    ids=["no key", "wrong server key", "unlisted key", "key of a frontend", "key of the scheduler"],
)
def test_wrong_keys_are_refused_with_a_reason_on_both_sides(
    secure: Server,
    keys: Path,
    caplog: pytest.LogCaptureFixture,
    own: str | None,
    change: str,
    error: type[Exception],
    reason: str,
) -> None:
    if change:
        shutil.copy(keys / "frontend" / "frontend.key_secret", keys / "worker" / "scheduler.key")
    client = new_client(secure.endpoint, Security(keys / own if own else None))
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
    assert f"a connection to {secure.endpoint} failed" in caplog.text or reason in caplog.text
    client.close()

    shutil.copy(keys / "scheduler" / "scheduler.key", keys / "worker")
    good, peer = connect(secure, security=Security(keys / "worker"))
    exchange(secure, good, peer)


def test_key_of_one_role_cannot_be_used_for_another_at_a_socket_for_both(keys: Path) -> None:
    server = Server("tcp://127.0.0.1:0", {"worker", "frontend"}, Security(keys / "scheduler"))
    for own, claimed in (("worker", "frontend"), ("frontend", "worker")):
        client = new_client(server.endpoint, Security(keys / own))
        reason = f"a '{claimed}' needs the key of a {claimed}, and this is the key of a {own}"
        with echoing(server), pytest.raises(HandshakeRefused, match=reason):
            client.handshake(claimed, "", PATIENCE)
        right, peer = connect(server, own, Security(keys / own))
        exchange(server, right, peer)
    server.close()


def test_probe_needs_a_key_that_the_socket_accepts(secure: Server, keys: Path) -> None:
    for own in ("scheduler", "worker"):
        client = new_client(secure.endpoint, Security(keys / own))
        with echoing(secure):
            client.handshake(PROBE, "", PATIENCE)
    assert not secure.peers
    stranger = new_client(secure.endpoint)
    with echoing(secure), pytest.raises((HandshakeRefused, HandshakeTimeout)):
        stranger.handshake(PROBE, "", PATIENCE)


def test_peer_that_chooses_its_routing_id_is_refused(secure: Server, keys: Path) -> None:
    """Otherwise it could wait until another peer leaves, and take its place before the loss is noticed."""
    with zmq.Context.instance().socket(zmq.DEALER) as chooser:
        chooser.linger = 0
        chooser.routing_id = b"\x01\x02\x03\x04\x05"
        chooser.curve_publickey, secret = load_certificate(keys / "worker" / "worker.key_secret")
        assert secret is not None
        chooser.curve_secretkey = secret
        chooser.curve_serverkey = load_certificate(keys / "worker" / "scheduler.key")[0]
        chooser.connect(secure.endpoint)
        chooser.send(encode(Hello(*PROTOCOL_VERSION, "worker", "")))
        with echoing(secure):
            assert chooser.recv() == encode(Refused("a peer must not choose its own routing id"))
    assert not secure.peers


def test_keys_can_be_added_and_removed_while_the_server_runs(secure: Server, keys: Path) -> None:
    added = allow(keys, "worker-2.key")
    client, peer = connect(secure, security=Security(keys / "unlisted"))
    exchange(secure, client, peer)
    added.unlink()
    late = new_client(secure.endpoint, Security(keys / "unlisted"))
    with echoing(secure), pytest.raises(HandshakeRefused, match="not one of the allowed keys"):
        late.handshake("worker", "", PATIENCE)
    exchange(secure, client, peer)  # a connection that exists stays open


def test_missing_directory_of_keys_refuses_every_client(secure: Server, keys: Path) -> None:
    (keys / "scheduler").rename(keys / "away")
    client = new_client(secure.endpoint, Security(keys / "worker"))
    with echoing(secure), pytest.raises(HandshakeRefused, match="not one of the allowed keys"):
        client.handshake("worker", "", PATIENCE)
    (keys / "away").rename(keys / "scheduler")
    good, peer = connect(secure, security=Security(keys / "worker"))
    exchange(secure, good, peer)


@pytest.mark.parametrize(
    ("role", "break_it", "text"),
    [
        ("scheduler", lambda own: (own / "scheduler.key_secret").unlink(), "scheduler.key_secret"),
        ("scheduler", lambda own: shutil.copy(own / "worker.key", own / "scheduler.key_secret"), "no secret key"),
        ("scheduler", lambda own: (own / "worker.key").write_text("no key"), "worker.key"),
        ("scheduler", lambda own: (own / "scheduler.key_secret").chmod(0o604), "chmod o= "),
        ("worker", lambda own: (own / "worker.key_secret").unlink(), r"one file \*.key_secret, but contains none"),
        (
            "worker", lambda own: shutil.copy(own / "worker.key_secret", own / "b.key_secret"),
            r"one file \*.key_secret, but contains b.key_secret, worker.key_secret",
        ),
        ("worker", lambda own: (own / "scheduler.key").unlink(), "scheduler.key"),
        ("worker", lambda own: (own / "worker.key_secret").chmod(0o640), ""),
    ],
)  # fmt: skip
def test_error_names_keys_that_cannot_be_used(keys: Path, role: str, break_it: object, text: str) -> None:
    assert callable(break_it)
    break_it(keys / role)
    security = Security(keys / role)
    if not text:  # a group may read it, as Kubernetes mounts secrets
        security.check(is_server=False)
        return
    with pytest.raises(OSError, match=text):
        security.check(is_server=role == "scheduler")
    make = Client if role == "worker" else lambda endpoint, own: Server(endpoint, {"worker"}, own)
    with pytest.raises(OSError, match=text):
        make("tcp://127.0.0.1:0", security)


def test_ipc_sockets_need_no_keys(keys: Path) -> None:
    server = Server(f"ipc://{keys}/socket", {"worker"}, Security(keys / "scheduler"))
    client, peer = connect(server, security=Security(keys / "worker"))
    exchange(server, client, peer)
    server.close()


def test_made_keys_are_private_and_each_role_gets_what_it_needs(directory: Path) -> None:
    assert "contains the keys of" in make_keys(directory / "k")
    files = {str(path.relative_to(directory / "k")): path for path in (directory / "k").rglob("*")}
    assert {name for name, path in files.items() if path.is_file()} == {
        "scheduler/scheduler.key_secret", "scheduler/scheduler.key", "scheduler/frontend.key", "scheduler/worker.key",
        "frontend/frontend.key_secret", "frontend/scheduler.key", "worker/worker.key_secret", "worker/scheduler.key",
    }  # fmt: skip
    for path in files.values():
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    for role in ("scheduler", "frontend", "worker"):
        Security(directory / "k" / role).check(is_server=role == "scheduler")
    before = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
    assert "they are kept" in make_keys(directory / "k")
    assert {name: files[name].read_bytes() for name in before} == before
    files["worker/scheduler.key"].unlink()
    with pytest.raises(ConfigurationError, match=r"worker/scheduler.key is missing; remove them"):
        make_keys(directory / "k")
