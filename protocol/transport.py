"""Sockets between services: one ROUTER that binds, many DEALERs that connect. Bytes and handshakes, no rules.

Endpoints are `ipc://path` (one machine; the directory is private) or `tcp://host:port`. Nothing drops silently: a
peer that is gone or does not read is an exception at the sender, a frame that is no message is counted.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgspec
import zmq

from protocol.codec import MAX_MESSAGE_BYTES, Decoder, ProtocolError, encode
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused, Welcome, check_version

log = logging.getLogger("runahead.transport")

HIGH_WATER_MARK = 10_000
"""Messages that may wait for one peer."""
MAX_IPC_PATH = 107
"""Bytes, the kernel's limit."""


class PeerGone(Exception):
    """The peer is not connected (any more)."""


class PeerSlow(Exception):
    """The peer does not read; its queue is full."""


class HandshakeRefused(Exception):
    """The other side does not want this connection; the text is its reason. Retrying cannot help."""


class HandshakeTimeout(Exception):
    """Nobody answered."""


def check_endpoint(endpoint: str) -> str:
    """The endpoint, if a service may bind or dial it. Raises: ValueError, saying what would be accepted."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > MAX_IPC_PATH:
            raise ValueError(f"{endpoint}: an ipc path has at most {MAX_IPC_PATH} bytes")
        return endpoint
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit():
        raise ValueError(f"{endpoint!r} is not an endpoint: use ipc://PATH or tcp://HOST:PORT")
    if host in ("*", "0.0.0.0", "[::]"):  # noqa: S104
        raise ValueError(
            f"{endpoint}: services speak unencrypted, name one internal address instead of {host}"
        )
    return endpoint


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)


class Server:
    """The side that binds. A peer is welcome once its `Hello` was accepted; until then nothing else of it is read."""

    def __init__(self, endpoint: str, roles: Collection[str]) -> None:
        self.endpoint = check_endpoint(endpoint)
        self.roles = roles
        self.peers: dict[bytes, Hello] = {}
        self.errors: Counter[str] = Counter()
        """Bad frames by peer name."""
        self._hello: Decoder[Hello] = Decoder(Hello)
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        _configure(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.socket.close()
            raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from None

    def send(self, peer: bytes, message: msgspec.Struct) -> None:
        """Raises: PeerGone, PeerSlow"""
        try:
            self.socket.send_multipart((peer, encode(message)), zmq.DONTWAIT)
        except zmq.Again:
            raise PeerSlow(f"{self.name(peer)} does not read") from None
        except zmq.ZMQError as error:
            raise PeerGone(f"{self.name(peer)} is not connected: {error.strerror}") from None

    def receive(self) -> tuple[bytes, Hello | bytes] | None:
        """What arrived next, without waiting: a new peer's accepted `Hello`, or a welcome peer's frame."""
        while True:
            try:
                peer, *frames = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return None
            if len(frames) != 1:
                self.count_error(peer, ProtocolError(f"{len(frames)} frames, expected 1"))
            elif peer in self.peers:
                return peer, frames[0]
            elif (hello := self._greet(peer, frames[0])) is not None:
                return peer, hello

    def _greet(self, peer: bytes, frame: bytes) -> Hello | None:
        try:
            hello = self._hello.decode(frame)
        except ProtocolError as error:
            self.count_error(peer, error)
            self.refuse(peer, "the first message must be a Hello")
            return None
        reason = check_version(hello)
        if reason is None and hello.role not in self.roles:
            reason = f"a {hello.role!r} is not expected here, only {' or '.join(sorted(self.roles))}"
        if reason is not None:
            self.refuse(peer, reason)
            return None
        self.peers[peer] = hello
        self._try_send(peer, Welcome(*PROTOCOL_VERSION))
        return hello

    def refuse(self, peer: bytes, reason: str) -> None:
        """Turns a peer away; it will not come back."""
        log.warning("refused %s: %s", self.name(peer), reason)
        self.peers.pop(peer, None)
        self._try_send(peer, Refused(reason))

    def _try_send(self, peer: bytes, message: msgspec.Struct) -> None:
        try:
            self.send(peer, message)
        except (PeerGone, PeerSlow) as error:
            log.warning("%s", error)

    def count_error(self, peer: bytes, error: Exception) -> None:
        """A bad frame costs its peer a line in the log and a count, nobody else anything."""
        self.errors[self.name(peer)] += 1
        log.warning("bad message from %s: %s", self.name(peer), error)

    def name(self, peer: bytes) -> str:
        hello = self.peers.get(peer)
        return f"{hello.role} {hello.name}" if hello else f"peer {peer.hex()}"

    def close(self) -> None:
        self.socket.close()
        if self.endpoint.startswith("ipc://"):
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)


class Client:
    """The side that connects: one conversation with one server. Not shared between threads."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = check_endpoint(endpoint)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        _configure(self.socket)
        self.socket.connect(endpoint)

    def handshake(self, role: str, name: str, timeout: float) -> None:
        """Greets the server and waits up to `timeout` seconds for its answer.

        Raises: HandshakeRefused, HandshakeTimeout
        """
        self.send(Hello(*PROTOCOL_VERSION, role, name))
        frame = self.receive(timeout)
        if frame is None:
            raise HandshakeTimeout(f"no answer from {self.endpoint} within {timeout:.0f} s")
        check_answer(frame)

    def send(self, message: msgspec.Struct) -> None:
        self.socket.send(encode(message))

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next frame; None after `timeout` seconds without one (None: waits for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0, round(1000 * (deadline - time.monotonic())))
            if self.socket.poll(left):
                return self.socket.recv()
            if deadline is not None and time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        self.socket.close()


_answer: Decoder[Welcome | Refused] = Decoder(Welcome | Refused)


def check_answer(frame: bytes) -> None:
    """Raises: HandshakeRefused, if the server's first frame is not a `Welcome`."""
    answer = _answer.decode(frame)
    if isinstance(answer, Refused):
        raise HandshakeRefused(answer.reason)
