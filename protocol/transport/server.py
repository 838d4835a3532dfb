"""The binding side of a socket."""

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TypeVar

import msgspec
import zmq

from protocol.codec import Decoder, ProtocolError, encode
from protocol.handshake import PROBE, PROTOCOL_VERSION, Hello, Refused, Welcome, check_version
from protocol.transport.curve import Authenticator, ServerKeys
from protocol.transport.endpoint import bind, check_endpoint, configure, ipc_path
from protocol.transport.errors import PeerGone, PeerSlow
from protocol.transport.monitor import FAILURES, Monitor

T = TypeVar("T")
log = logging.getLogger("runahead.transport")

MAX_PEERS = 1024
"""Maximum number of peers; more are refused."""
_HELLO = encode(Hello(*PROTOCOL_VERSION, "", ""))[:-4]
"""Common prefix of every `Hello`, without its version and its two texts."""
UNKNOWN = "unknown"
"""Role of a peer without a handshake, in the counts of errors."""


class Server:
    """Socket for many peers. Other frames of a peer are read only after its `Hello` was accepted.

    Poll `socket` and `events`, then call `receive` until it returns None. Must not be shared between threads.
    """

    def __init__(self, endpoint: str, roles: Collection[str], keys: ServerKeys | None = None) -> None:
        """Raises: ValueError, if the endpoint must not be bound; OSError, if it is in use or a key is missing."""
        check_endpoint(endpoint, encrypted=keys is not None)
        self._roles = roles
        self.peers: dict[bytes, Hello] = {}
        self.errors: Counter[str] = Counter()
        """Number of invalid messages, refused peers and failed connections by role."""
        self._hello: Decoder[Hello] = Decoder(Hello, max_bytes=4096)
        self._authenticator = Authenticator(keys) if keys is not None else None
        context = self._authenticator.context if self._authenticator else zmq.Context.instance()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._monitor = Monitor(self.socket)
        self._disconnected = False
        self.endpoint = ""
        """Endpoint for clients, with the actual port if 0 was requested."""
        self._file: tuple[int, int] | None = None
        """Device and inode of the bound ipc socket."""
        try:
            configure(self.socket, endpoint)
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if self._authenticator is not None:
                self._authenticator.secure(self.socket)
            self.endpoint = bind(self.socket, endpoint, encrypted=keys is not None)
            self._file = _file_of(self.endpoint)
        except BaseException:
            self.close()
            raise

    def send(self, peer: bytes, message: msgspec.Struct) -> None:
        """Raises: PeerGone, PeerSlow"""
        self.send_frame(peer, encode(message))

    def send_frame(self, peer: bytes, frame: bytes) -> None:
        """Send an encoded message, for messages to many peers. Raises: PeerGone, PeerSlow"""
        try:
            self.socket.send_multipart((peer, frame), zmq.DONTWAIT)
        except zmq.Again:
            raise PeerSlow(f"{self.name(peer)} does not read") from None
        except zmq.ZMQError as error:
            gone = PeerGone(f"{self.name(peer)} is not connected: {error.strerror}")
            self.peers.pop(peer, None)
            raise gone from None

    def receive(self) -> tuple[bytes, Hello | bytes] | None:
        """Return the next peer and its accepted `Hello` or frame, or None if nothing has arrived."""
        while True:
            try:
                peer, *frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                self._read_events()
                return None
            if len(frames) != 1:
                self.count_error(peer, ProtocolError(f"{len(frames)} frames, expected 1"))
            elif peer in self.peers:
                if not frames[0].startswith(_HELLO):  # a second Hello, see Client
                    return peer, frames[0]
            elif (hello := self._handshake(peer, frames[0])) is not None:
                return peer, hello

    def messages(self, decoder: Decoder[T]) -> Iterator[tuple[bytes, Hello | T]]:
        """Yield all messages that have arrived. Invalid messages are counted."""
        while (received := self.receive()) is not None:
            peer, frame = received
            try:
                message = frame if isinstance(frame, Hello) else decoder.decode(frame)
            except ProtocolError as error:
                self.count_error(peer, error)
                continue
            yield peer, message

    def _handshake(self, peer: bytes, frame: bytes) -> Hello | None:
        try:
            hello = self._hello.decode(frame)
        except ProtocolError as error:
            self.refuse(peer, f"the first message must be a Hello; {error}")
            return None
        # A probe is answered even without room for peers: the answer shows that the loop reads.
        is_probe = hello.role == PROBE
        reason = check_version(hello) or (None if is_probe else self._objection(hello))
        if reason is not None:
            self.refuse(peer, reason)
            return None
        if not is_probe:
            self.peers[peer] = hello
        self._try_send(peer, Welcome(*PROTOCOL_VERSION))
        return None if is_probe else hello

    def _objection(self, hello: Hello) -> str | None:
        if hello.role not in self._roles:
            return f"a {hello.role!r} may not connect here, only {' or '.join(sorted(self._roles))}"
        if len(self.peers) >= MAX_PEERS:
            return f"{MAX_PEERS} peers are connected already"
        return None

    def refuse(self, peer: bytes, reason: str) -> None:
        """Refuse a peer, before or after its handshake. It does not retry."""
        hello = self.peers.pop(peer, None)
        self._count(hello.role if hello else UNKNOWN, f"refused peer {peer.hex()}: {reason}")
        self._try_send(peer, Refused(reason))

    def _try_send(self, peer: bytes, message: msgspec.Struct) -> None:
        try:
            self.send(peer, message)
        except (PeerGone, PeerSlow) as error:
            log.warning("%s", error)

    def count_error(self, peer: bytes, error: Exception) -> None:
        """Count an invalid message of a peer."""
        hello = self.peers.get(peer)
        self._count(hello.role if hello else UNKNOWN, f"bad message from {self.name(peer)}: {error}")

    def _count(self, role: str, text: str) -> None:
        """Count an error and log the first, second, fourth, eighth ... of a role, to bound the log."""
        self.errors[role] += 1
        count = self.errors[role]
        if not count & (count - 1):
            log.warning("%s (%d so far)", text, count)

    def _read_events(self) -> None:
        for event in self._monitor.read():
            if event in FAILURES:
                self._count(UNKNOWN, f"a connection to {self.endpoint} failed: {FAILURES[event]}")
            self._disconnected |= event == zmq.EVENT_DISCONNECTED

    @property
    def events(self) -> zmq.Socket[bytes]:
        """Socket that is readable when a connection was made or lost. `receive` reads it."""
        return self._monitor.socket

    @property
    def replaced(self) -> bool:
        """Return whether another server has taken the place of this one: its ipc socket is not the one in the file
        system any more."""
        return self._file != _file_of(self.endpoint)

    def take_disconnected(self) -> bool:
        """Return whether a connection was lost since the last call. Only `send` to a peer shows whose it was."""
        disconnected, self._disconnected = self._disconnected, False
        return disconnected

    def name(self, peer: bytes) -> str:
        """Return the peer's role and name in one line, for logs."""
        hello = self.peers.get(peer)
        return f"{hello.role} {hello.name!r}" if hello else f"peer {peer.hex()}"

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket.

        Args:
            linger_ms: time for messages that are still queued, milliseconds. The end of the context waits for them.
        """
        if self.socket.closed:
            return
        self._monitor.close()
        self.socket.close(linger_ms)
        if self._authenticator is not None:
            self._authenticator.close()
        if (path := ipc_path(self.endpoint)) is not None:
            path.unlink(missing_ok=True)


def _file_of(endpoint: str) -> tuple[int, int] | None:
    """Return device and inode of an ipc socket in the file system; None if there is none."""
    if (path := ipc_path(endpoint)) is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
