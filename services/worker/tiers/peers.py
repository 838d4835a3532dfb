"""KV blocks between workers of two engines: one thread serves those of this rank, and loads fetch those of others.

Only workers may connect, and a worker fetches only from keys of workers that it knows: a frontend names the peer, and
must not be able to let it read from a stranger. Answers are bounded, and so are those that wait for a slow peer.
"""

import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import zmq

from protocol.block_names import split_names
from protocol.codec import Decoder, ProtocolError
from protocol.kv_transfer import MAX_FETCH_BYTES, PEER_ROLE, FetchBlocks, FetchedBlocks
from protocol.security import Security, public_roles, server_pair
from protocol.transport import Client, HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow, Server
from protocol.transport.endpoint import ipc_path, is_everywhere
from services.process import name_this_thread
from services.worker.runner import LoadError

log = logging.getLogger("runahead.worker")

PATIENCE = 2.0
"""Seconds to wait for a peer."""
LOST_SECONDS = 10.0
"""Seconds for which a peer is not asked after an error. Loads wait for one another, and those of the streams of a lost
engine are many."""
MAX_ANSWERS = 4
"""Maximum number of answers that wait for one peer."""
ASKED_AHEAD = 2
"""Questions in flight of one load."""
MAX_CONNECTIONS = 8
_POLL_MS = 200
_QUESTIONS: Decoder[FetchBlocks] = Decoder(FetchBlocks)
_ANSWERS: Decoder[FetchedBlocks] = Decoder(FetchedBlocks)
_ERRORS = (HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow, ProtocolError, zmq.ZMQError, OSError, ValueError)
Find = Callable[[bytes, Sequence[bytes]], tuple[int, memoryview]]
"""(identity, names) -> the first blocks of these that are here: their number and data. Called on the serving thread."""


class PeerServer:
    """Serves blocks of this rank until the process ends."""

    def __init__(self, endpoint: str, security: Security, find: Find) -> None:
        """Raises: LoadError, if the endpoint cannot be bound, or is no address to which others could connect."""
        self._find = find
        security = replace(security, binds_as="worker")
        try:
            self.server = Server(endpoint, {PEER_ROLE}, security, MAX_ANSWERS)
            key = server_pair(security.keys, "worker")[0].decode() if security.keys is not None else ""
        except (OSError, ValueError) as error:
            raise LoadError(f"--kv-peer-address: {error}") from None
        if is_everywhere(self.server.endpoint):
            self.server.close()
            raise LoadError(f"--kv-peer-address {endpoint}: other engines need one address of this machine instead")
        self.address = f"{self.server.endpoint} {key}".strip()
        """`Loaded.kv_peer`"""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="blocks peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _serve(self) -> None:
        name_this_thread()
        server, poller = self.server, zmq.Poller()
        for source in server.sockets:
            poller.register(source, zmq.POLLIN)
        while not self._closing.is_set():
            poller.poll(_POLL_MS)
            for peer, question in server.messages(_QUESTIONS):
                if isinstance(question, FetchBlocks):
                    self._answer(peer, question)
            server.lost.clear()  # `take_lost` sends checks, which would take the places of answers
        server.close()

    def _answer(self, peer: bytes, question: FetchBlocks) -> None:
        try:
            count, data = self._find(question.identity, split_names(question.names))
            self.server.send(peer, FetchedBlocks(count, data))
        except ProtocolError as error:
            self.server.expel(peer, error)
        except (PeerGone, PeerSlow) as error:
            log.debug("a peer is not answered: %s", error)


class PeerClient:
    """Connections of a rank to that rank of other engines. For one thread."""

    def __init__(self, security: Security, identity: bytes, rank: int = 0) -> None:
        self._security, self._identity, self._rank = security, identity, rank
        self._clients: OrderedDict[str, Client] = OrderedDict()
        """By address; the one that was used last is the last one."""
        self._lost: dict[str, float] = {}
        """Addresses that are not asked, and until when: monotonic seconds."""

    def fetch(self, addresses: Sequence[str], names: Sequence[bytes], block_bytes: int) -> Iterator[memoryview]:
        """Iterate over the first blocks of these that a peer has. They end early at any error.

        Args:
            addresses: `Loaded.kv_peer` of each rank.
        """
        if self._rank >= len(addresses):
            return
        address, now = addresses[self._rank], time.monotonic()
        if self._lost.get(address, now) > now:
            return
        per_answer = max(1, MAX_FETCH_BYTES // block_bytes)
        questions = [names[at : at + per_answer] for at in range(0, len(names), per_answer)]
        is_complete = False
        try:
            client = self._connected(address)
            for question in questions[:ASKED_AHEAD]:
                client.send(FetchBlocks(self._identity, b"".join(question)))
            for index, question in enumerate(questions):
                if (frame := client.receive(PATIENCE)) is None:
                    raise HandshakeTimeout(f"no block from {address.split()[0]} within {PATIENCE:g} s")
                answer = _ANSWERS.decode(frame)
                if len(answer.data) != answer.count * block_bytes or answer.count > len(question):
                    raise ProtocolError(f"{answer.count} blocks in {len(answer.data)} bytes")
                for at in range(0, len(answer.data), block_bytes):
                    yield answer.data[at : at + block_bytes]
                if answer.count < len(question):
                    is_complete = index + 1 >= len(questions)
                    return
                if (following := index + ASKED_AHEAD) < len(questions):
                    client.send(FetchBlocks(self._identity, b"".join(questions[following])))
            is_complete = True
        except _ERRORS as error:
            log.warning("KV blocks of another engine are computed: %s", error)
            self._lost = {lost: until for lost, until in self._lost.items() if until > now}
            self._lost[address] = time.monotonic() + LOST_SECONDS
        finally:
            if not is_complete:  # answers may still come
                self._disconnect(address)

    def _connected(self, address: str) -> Client:
        """Raises: one of `_ERRORS`"""
        if (known := self._clients.get(address)) is not None:
            self._clients.move_to_end(address)
            return known
        endpoint, _, key = address.partition(" ")
        keys, path = self._security.keys, ipc_path(endpoint)
        if path is not None and path.stat().st_uid != os.geteuid():  # ipc has no keys
            raise PermissionError(f"{endpoint} is a socket of another user")
        if path is None and keys is not None and public_roles(keys).get(key.encode()) != "worker":
            raise ValueError(f"the key of {endpoint} is not one of a worker in --transport-keys")
        client = Client(endpoint, self._security.with_server_key(key))
        try:
            client.handshake(PEER_ROLE, f"{socket.gethostname()}:{os.getpid()}", PATIENCE)
        except BaseException:
            client.close()
            raise
        self._clients[address] = client
        if len(self._clients) > MAX_CONNECTIONS:
            self._clients.popitem(last=False)[1].close()
        return client

    def _disconnect(self, address: str) -> None:
        if (client := self._clients.pop(address, None)) is not None:
            client.close()

    def close(self) -> None:
        for address in [*self._clients]:
            self._disconnect(address)
