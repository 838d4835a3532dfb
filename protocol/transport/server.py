"""The binding side of a socket."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from protocol.codec import Decoder, ProtocolError, encode
from protocol.handshake import PROBE, PROTOCOL_VERSION, Hello, Refused, Welcome, check_version
from protocol.security import LOCAL, SERVER, Security, key_role
from protocol.transport.endpoint import HIGH_WATER_MARK, bind, check_endpoint, configure, ipc_path
from protocol.transport.errors import PeerGone, PeerSlow
from protocol.transport.monitor import FAILURES, Monitor

if TYPE_CHECKING:
    from protocol.transport.curve import SecureContext

T = TypeVar("T")
log = logging.getLogger("runahead.transport")

MAX_PEERS = 1024
"""Maximum number of peers; more are refused."""
SWEEP_INTERVAL, SWEEP_SECONDS = 0.05, 1.0
"""Minimum seconds between two sweeps, and seconds for which there are some after a connection broke: libzmq drops a
peer a little after it reports it."""
CHECK = b""
"""Frame that tests a connection. Clients ignore it."""
_HELLO = encode(Hello(*PROTOCOL_VERSION, "", ""))[:-4]
"""Common prefix of every `Hello`, without its version and its two texts."""
IDENTITY_BYTES = 5
"""Size of a routing id that libzmq has chosen: a zero and a counter."""
_NOWAIT, _MORE = int(zmq.DONTWAIT), int(zmq.DONTWAIT | zmq.SNDMORE)
"""Numbers, as an operation of pyzmq's enumerations takes as long as sending."""
UNKNOWN = "unknown"
"""Role of a peer without a handshake, in the counts of errors."""


class Server:
    """Socket for many peers. Other frames of a peer are read only after its `Hello` was accepted.

    A peer that violates the protocol is expelled: only its own connection is lost (identity, docs/invariants.md).

    Poll `sockets`, then call `receive` until it returns None. Must not be shared between threads.
    """

    def __init__(
        self, endpoint: str, roles: Collection[str], security: Security = LOCAL, max_queued: int = HIGH_WATER_MARK
    ) -> None:
        """`max_queued`: messages that wait for one peer.

        Raises: ValueError, if the endpoint must not be bound; OSError, if it is in use or a key is missing.
        """
        check_endpoint(endpoint, security)
        self._roles = roles
        self.peers: dict[bytes, Hello] = {}
        self.errors: Counter[str] = Counter()
        """Number of invalid messages, refused peers and failed connections by role."""
        self.lost: list[bytes] = []
        """Peers that were removed since the last `take_lost`."""
        self._swept = self._sweep_until = 0.0
        self._hello: Decoder[Hello] = Decoder(Hello, max_bytes=4096)
        self._secure = _secure_context(endpoint, roles, security)
        context = self._secure.context if self._secure is not None else zmq.Context.instance()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._monitor = Monitor(self.socket)
        self._poller = zmq.Poller()
        for source in (self.socket, self._monitor.socket):
            self._poller.register(source, zmq.POLLIN)
        self.endpoint = ""
        """Endpoint for clients, with the actual port if 0 was requested."""
        self._file: tuple[int, int] | None = None
        """Device and inode of the bound ipc socket."""
        try:
            configure(self.socket, endpoint)
            self.socket.sndhwm = max_queued
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if self._secure is not None:
                self._secure.secure(self.socket)
            self.endpoint = bind(self.socket, endpoint, security)
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
            self.socket.send(peer, _MORE)
            self.socket.send(frame, _NOWAIT)
        except zmq.Again:
            raise PeerSlow(f"{self.name(peer)} does not read") from None
        except zmq.ZMQError:
            gone = PeerGone(f"{self.name(peer)} is not connected")
            self._remove(peer)
            raise gone from None

    def receive(self) -> tuple[bytes, Hello | bytes] | None:
        """Return the next peer and its accepted `Hello` or frame, or None if nothing has arrived."""
        while ready := self._poller.poll(0):  # the socket is the first in it
            if ready[0][0] is self._monitor.socket:
                self._read_events()
                continue
            peer, frames, key = self._read()
            if len(frames) != 1:
                self.expel(peer, ProtocolError(f"{len(frames)} frames, expected 1"))
            elif peer in self.peers:
                if not frames[0].startswith(_HELLO):  # a second Hello, see Client
                    return peer, frames[0]
            elif (hello := self._handshake(peer, frames[0], key)) is not None:
                return peer, hello
        return None

    def _read(self) -> tuple[bytes, list[bytes], str | None]:
        """Return the next peer, its frames, and the role of its key; None: the socket has no keys."""
        frames = [self.socket.recv(_NOWAIT, copy=False)]
        while frames[-1].more:  # `recv_multipart` asks the socket, which takes twice as long
            frames.append(self.socket.recv(_NOWAIT, copy=False))
        identity, *found = frames
        key = None if self._secure is None else str(identity.get("User-Id"))
        return identity.bytes, [frame.bytes for frame in found], key

    def messages(self, decoder: Decoder[T]) -> Iterator[tuple[bytes, Hello | T]]:
        """Yield all messages that have arrived. The sender of an invalid one is expelled."""
        while (received := self.receive()) is not None:
            peer, frame = received
            try:
                message = frame if isinstance(frame, Hello) else decoder.decode(frame)
            except ProtocolError as error:
                self.expel(peer, error)
                continue
            yield peer, message

    def _handshake(self, peer: bytes, frame: bytes, key: str | None) -> Hello | None:
        try:
            hello = self._hello.decode(frame)
        except ProtocolError as error:
            self.refuse(peer, f"the first message must be a Hello; {error}")
            return None
        # A probe is answered even without room for peers: the answer shows that the loop reads.
        is_probe = hello.role == PROBE
        reason = check_version(hello) or (None if is_probe else self._objection(peer, hello, key))
        if reason is not None:
            self.refuse(peer, reason)
            return None
        if not is_probe:
            self.peers[peer] = hello
        self._try_send(peer, Welcome(*PROTOCOL_VERSION))
        return None if is_probe else hello

    def _objection(self, peer: bytes, hello: Hello, key: str | None) -> str | None:
        if hello.role not in self._roles:
            return f"a {hello.role!r} may not connect here, only {' or '.join(sorted(self._roles))}"
        if key not in (None, key_role(hello.role)):
            return f"a {hello.role!r} needs the key of a {key_role(hello.role)}, and this is the key of a {key}"
        if len(peer) != IDENTITY_BYTES or peer[0]:
            return "a peer must not choose its own routing id"
        if len(self.peers) >= MAX_PEERS:
            self._sweep()
        if len(self.peers) >= MAX_PEERS:
            return f"{MAX_PEERS} peers are connected already"
        return None

    def _sweep(self) -> None:
        """Remove the peers that have left. Only a message to a peer shows whether it is connected."""
        if (now := time.monotonic()) - self._swept < SWEEP_INTERVAL:
            return
        self._swept = now
        for peer in list(self.peers):
            with suppress(PeerGone, PeerSlow):
                self.send_frame(peer, CHECK)

    def expel(self, peer: bytes, error: Exception) -> None:
        """Refuse a peer that has violated the protocol. It is in the next `take_lost`."""
        self.count_error(peer, error)
        self._remove(peer)
        self._try_send(peer, Refused(f"bad message: {error}"))

    def _remove(self, peer: bytes) -> None:
        if self.peers.pop(peer, None) is not None:
            self.lost.append(peer)

    @property
    def sweeps(self) -> bool:
        """Return whether a connection broke lately, so that `take_lost` looks for its peer."""
        return self._swept < self._sweep_until

    def take_lost(self) -> list[bytes]:
        """Return the peers that were found to be gone or were expelled since the last call. Call it regularly."""
        if self.sweeps:
            self._sweep()
        lost, self.lost = self.lost, []
        return lost

    def refuse(self, peer: bytes, reason: str) -> None:
        """Refuse a peer, before or after its handshake. It does not retry."""
        hello = self.peers.pop(peer, None)
        self._count(hello.role if hello else UNKNOWN, f"refused peer {peer.hex()}: {reason}")
        self._try_send(peer, Refused(reason))

    def _try_send(self, peer: bytes, message: msgspec.Struct) -> None:
        try:
            self.send(peer, message)
        except (PeerGone, PeerSlow) as error:
            log.debug("%s", error)

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
            if event == zmq.EVENT_DISCONNECTED:
                self._sweep_until = time.monotonic() + SWEEP_SECONDS

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """The socket, and one that is readable when a connection was made or lost."""
        return self.socket, self._monitor.socket

    @property
    def replaced(self) -> bool:
        """Return whether another server has taken the place of this one: its ipc socket is not the one in the file
        system any more."""
        return self._file != _file_of(self.endpoint)

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
        if self._secure is not None:
            self._secure.close()
        if (path := ipc_path(self.endpoint)) is not None:
            path.unlink(missing_ok=True)


def _secure_context(endpoint: str, roles: Collection[str], security: Security) -> "SecureContext | None":
    """Return the context of a socket with keys, which accepts keys of `roles`, and the server's own one for probes.

    Raises: OSError, if a key is missing or invalid.
    """
    if security.keys is None or ipc_path(endpoint) is not None:
        return None
    # Imported here because it imports asyncio, which a service without keys may not need.
    from protocol.transport.curve import SecureContext

    return SecureContext(security.keys, {SERVER, *map(key_role, roles)}, security.binds_as)


def _file_of(endpoint: str) -> tuple[int, int] | None:
    """Return device and inode of an ipc socket in the file system; None if there is none."""
    if (path := ipc_path(endpoint)) is None:
        return None
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
