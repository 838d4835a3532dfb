"""KV blocks between workers of two engines, over real sockets."""

import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from queue import Queue

import pytest

from protocol.codec import encode, pack
from protocol.kv_transfer import MAX_FETCH_BYTES, PEER_ROLE, FetchBlocks, FetchedBlocks
from protocol.membership import Loaded
from protocol.security import LOCAL, Security
from protocol.steps import BlocksLoaded, LoadBlocks
from protocol.transport import Client, HandshakeRefused, HandshakeTimeout, PeerGone, Server
from services.cli.transport_keys import make_keys
from services.config import WorkerConfig
from services.worker.runner import LoadError
from services.worker.tiers import peers
from services.worker.tiers.offload import Offload
from services.worker.tiers.peers import PeerClient, PeerServer
from tests.unit.worker.test_transfers import BLOCKS, LAYERS, SIZE, Rank, name
from tests.waiting import PATIENCE, wait_until

IDENTITY = sha256(b"model").digest()
BLOCK_BYTES = LAYERS * SIZE + SIZE
LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.transfers.end()


@pytest.fixture
def serve(rank: Rank) -> Iterator[Callable[[Security], PeerServer]]:
    """Start servers of the rank's blocks."""
    started: list[PeerServer] = []

    def start(security: Security = LOCAL, endpoint: str = LOOPBACK) -> PeerServer:
        def find(identity: bytes, names: list[bytes]) -> tuple[int, memoryview]:
            return rank.transfers.find(names) if identity == IDENTITY else (0, memoryview(b""))

        started.append(PeerServer(endpoint, security, find))
        return started[-1]

    yield start
    for server in started:
        server.close()


def fetched(client: PeerClient, address: str, *numbers: int) -> list[bytes]:
    return [bytes(block) for block in client.fetch([address], [*map(name, numbers)], BLOCK_BYTES)]


@pytest.mark.parametrize("most", [1, 2 * BLOCK_BYTES])
def test_blocks_are_fetched_by_name_up_to_the_first_that_is_missing(
    rank: Rank, serve: Callable[..., PeerServer], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """In several messages, of one block or two each. A block of the server's tier counts."""
    rank.follow(1, 2, 3, 4, 5)
    rank.tier.put(name(6), memoryview(b"6" * BLOCK_BYTES))
    monkeypatch.setattr(peers, "MAX_FETCH_BYTES", most)
    server, client = serve(), PeerClient(LOCAL, IDENTITY)
    for _ in range(2):
        wanted = [rank.content(block) for block in (1, 2, 3, 4, 5)] + [b"6" * BLOCK_BYTES]
        assert fetched(client, server.address, 1, 2, 3, 4, 5, 6, 7, 1) == wanted
        assert fetched(client, server.address, 1, 9, 2, 3, 4) == wanted[:1]
        assert fetched(client, server.address, 3) == wanted[2:3], "no answer to a question before"
        assert fetched(client, server.address, 7, 1) == []
    client.close()
    assert fetched(PeerClient(LOCAL, IDENTITY, rank=1), server.address, 1) == [], "an engine of fewer ranks"


def test_engines_with_other_weights_share_no_block() -> None:
    engines = [(Rank(), WorkerConfig(kv_peer_address=LOOPBACK)) for _ in range(3)]
    answers = Queue[BlocksLoaded]()
    offloads = []
    for (rank, config), digest in zip(engines, ("same", "same", "other"), strict=True):
        rank.memory.content = "model"
        offloads.append(offload := Offload(config, answers.put))
        offload.open(rank.memory, Loaded("", 0, 0, SIZE, BLOCKS, contents={"norm": digest}), 0)
        offload.begin(rank.memory)
    first, *others = offloads
    engines[0][0].whole(1)
    for offload, count in zip(others, (1, 0), strict=True):
        offload.load(LoadBlocks(1, 1, 1, pack([0]), name(1), peers=[first.kv_peer]))
        assert answers.get(timeout=PATIENCE).count == count
    for offload, (rank, _) in zip(offloads, engines, strict=True):
        offload.end(leaves=True)
        rank.transfers.end()


def test_a_peer_that_is_not_there_or_answers_wrongly_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "PATIENCE", 0.2)
    client = PeerClient(LOCAL, IDENTITY)
    assert fetched(client, "tcp://127.0.0.1:9", 1) == []
    assert fetched(client, "no endpoint", 1) == []
    assert fetched(PeerClient(Security(insecure=True), IDENTITY), "tcp://-x:7000", 1) == [], "no name of a host"
    assert fetched(client, "tcp://10.0.0.1:7000", 1) == [], "beyond loopback without keys"
    liar = Server(LOOPBACK, {PEER_ROLE})
    assert fetched(client, liar.endpoint, 1) == []
    assert fetched(client, "tcp://127.0.0.1:9", 1) == [], "it is not asked again: streams of a lost engine are many"
    assert caplog.text.count("are computed") == 5
    liar.close()
    client.close()


@pytest.mark.parametrize(
    "answer",
    [FetchedBlocks(1, memoryview(b"short")), FetchedBlocks(9, memoryview(b"")),
     FetchedBlocks(3, memoryview(bytes(3 * BLOCK_BYTES)))],
)  # fmt: skip
def test_an_answer_of_another_size_is_dropped(answer: FetchedBlocks) -> None:
    server = PeerServer(LOOPBACK, LOCAL, lambda identity, names: (answer.count, answer.data))
    client = PeerClient(LOCAL, IDENTITY)
    assert fetched(client, server.address, 1, 2) == []
    server.close()
    client.close()


def test_a_question_for_too_much_ends_the_connection(serve: Callable[..., PeerServer]) -> None:
    client = Client(serve().address, LOCAL)
    client.handshake(PEER_ROLE, "greedy", 5)
    client.send(FetchBlocks(IDENTITY, bytes(32) * (MAX_FETCH_BYTES // BLOCK_BYTES + 1)))
    with pytest.raises(HandshakeRefused, match="more than one answer"):
        client.receive(5)
    client.close()
    assert len(encode(FetchBlocks(IDENTITY, bytes(32) * BLOCKS))) < 400


def test_no_check_of_connections_takes_the_place_of_an_answer(serve: Callable[..., PeerServer]) -> None:
    server = serve()
    client, other = Client(server.address, LOCAL), Client(server.address, LOCAL)
    for each in (client, other):
        each.handshake(PEER_ROLE, "peer", 5)
    other.close()
    wait_until(lambda: server.server.sweeps, "the server has seen that one left")
    client.send(FetchBlocks(IDENTITY, name(1)))
    assert client.socket.recv() == encode(FetchedBlocks(0, memoryview(b"")))
    client.close()


def test_only_workers_with_known_keys_fetch(
    rank: Rank,
    serve: Callable[..., PeerServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frontends, schedulers and workers of strangers may not, and nothing is fetched from a stranger."""
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "theirs")
    ours, theirs = (Security(tmp_path / side / "worker") for side in ("ours", "theirs"))
    rank.follow(1)
    server, client = serve(ours), PeerClient(ours, IDENTITY)
    assert fetched(client, server.address, 1) == [rank.content(1)]
    for role in ("frontend", "scheduler"):
        keys = Security(tmp_path / "ours" / role).with_server_key(server.address.split()[1])
        other = Client(server.address.split()[0], keys)
        with pytest.raises((HandshakeRefused, HandshakeTimeout, PeerGone)):
            other.handshake(PEER_ROLE, "other", 1)
        other.close()
    stranger, their_client = serve(theirs), PeerClient(theirs, IDENTITY)
    assert fetched(their_client, stranger.address, 1) == [rank.content(1)]
    assert fetched(client, stranger.address, 1) == []
    assert "is not one of a worker in --transport-keys" in caplog.text, "whomever it lets in"
    assert fetched(their_client, server.address, 1) == []
    their_client.close()
    local, key = serve(endpoint=f"ipc://{tmp_path}/peer").address, server.address.split()[1]
    for address in (serve().address, f"ipc://@abstract {key}"):
        assert fetched(client, address, 1) == [], "nothing shows whose it is"
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert fetched(PeerClient(ours, IDENTITY), f"{local} {key}", 1) == [], "it is another user's, and has no key"
    assert fetched(client, local, 1) == [rank.content(1)]
    client.close()


def test_an_endpoint_that_cannot_be_bound_or_reached_is_refused(tmp_path: Path) -> None:
    def find(*_: object) -> tuple[int, memoryview]:
        return 0, memoryview(b"")

    with pytest.raises(LoadError, match=r"--kv-peer-address: .*keys"):
        PeerServer("tcp://10.0.0.1:0", LOCAL, find)
    make_keys(tmp_path)
    with pytest.raises(LoadError, match="one address of this machine"):
        PeerServer("tcp://0.0.0.0:0", Security(tmp_path / "worker"), find)
