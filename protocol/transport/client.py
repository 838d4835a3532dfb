"""The side that connects."""

import math
import time
from contextlib import suppress

import msgspec
import zmq

from protocol.codec import Decoder, ProtocolError, encode
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused, Welcome
from protocol.transport.curve import ClientKeys, secure_client
from protocol.transport.endpoint import check_endpoint, configure
from protocol.transport.errors import HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.monitor import FAILURES, FINAL, Monitor

SEND_TIMEOUT_MS = 10_000
"""How long `send` waits for room in the queue."""

_answer: Decoder[Welcome | Refused] = Decoder(Welcome | Refused)
_REFUSED = encode(Refused(""))[:-1]
"""How every `Refused` begins."""


class Client:
    """One conversation with one server. Not shared between threads. `keys` make it encrypted (tcp only)."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        """Raises: ValueError, for an endpoint that cannot be dialled; OSError, for keys that cannot be read"""
        self.endpoint = check_endpoint(endpoint, encrypted=keys is not None)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._monitor = Monitor(self.socket)
        try:
            configure(self.socket, endpoint)
            self.socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
            if keys is not None:
                secure_client(self.socket, keys)
            self.socket.connect(endpoint)
        except BaseException:
            self.close()
            raise
        self._connected = self._lost = self._welcome = self._broken = self._gone = self._hopeless = False
        self._greeting: Hello | None = None
        self._failure = ""
        self._poller = zmq.Poller()
        for source in (self.socket, self._monitor.socket):
            self._poller.register(source, zmq.POLLIN)

    def handshake(self, role: str, name: str, timeout: float) -> None:
        """Greets the server and waits up to `timeout` seconds for its answer.

        Raises: HandshakeRefused, HandshakeTimeout
        """
        self.greet(role, name)
        frame = self.receive(timeout)
        if frame is None:
            raise self.unanswered(timeout)
        self.accept(frame)

    def greet(self, role: str, name: str) -> None:
        """The first half of `handshake`; `accept` is the second."""
        self._greeting = Hello(*PROTOCOL_VERSION, role, name)
        self._greet()

    def _greet(self) -> None:
        if self._greeting is not None:
            # No room before the first message: the connection failed, `receive` says how.
            with suppress(PeerSlow):
                self.send(self._greeting, wait=False)

    def send(self, message: msgspec.Struct, wait: bool = True) -> None:
        """Raises: PeerSlow, without room in the queue (for 10 s, unless told not to wait); PeerGone, once `receive` has
        said so: what the server sent before it left is always read first"""
        if self._gone:
            raise PeerGone(f"{self.endpoint} closed the connection")
        try:
            self.socket.send(encode(message), 0 if wait else zmq.DONTWAIT)
        except zmq.Again:
            raise PeerSlow(f"{self.endpoint} does not read") from None

    def receive(self, timeout: float | None = None) -> bytes | None:
        """The next frame; None after `timeout` seconds without one (None: waits for ever).

        Raises: PeerGone, when the server left and all it sent was read; HandshakeRefused, when it turned us away or
            cannot be spoken to
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (frame := self.take()) is None:
            left = None if deadline is None else math.ceil(1000 * (deadline - time.monotonic()))
            if left is not None and left <= 0:
                return None
            self._poller.poll(left)
        return frame

    def take(self) -> bytes | None:
        """`receive` without waiting."""
        self._watch()  # first: what the server sent before it left is readable by then
        try:
            frame = self.socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            if self._broken:
                self._gone = True
                raise PeerGone(f"{self.endpoint} closed the connection") from None
            if self._hopeless:
                raise HandshakeRefused(f"no connection to {self.endpoint}: {self._failure}") from None
            return None
        if frame.startswith(_REFUSED):
            check_answer(frame)
        return frame

    def accept(self, answer: bytes) -> None:
        """Takes the server's answer to a `Hello`. Raises: HandshakeRefused"""
        check_answer(answer)
        self._watch()  # the sign that we are connected came before the answer, perhaps only just before
        self._welcome, self._broken = True, not self._connected

    def _watch(self) -> None:
        for event in self._monitor.read():
            if event in FAILURES:
                self._failure = FAILURES[event]
                self._hopeless |= event in FINAL
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                if self._lost and not self._welcome:  # the Hello, perhaps, as well; twice does no harm
                    self._greet()
            else:
                self._connected, self._lost = False, True
                # For ever: on a new connection the server would not know us.
                self._broken |= self._welcome

    def unanswered(self, timeout: float) -> HandshakeTimeout:
        text = f"no answer from {self.endpoint} within {timeout:g} s"
        return HandshakeTimeout(f"{text}: {self._failure}" if self._failure else text)

    @property
    def fds(self) -> tuple[int, int]:
        """For an event loop: `take` has something to do when one is readable, and after each `send`."""
        return int(self.socket.fd), int(self._monitor.socket.fd)

    def close(self) -> None:
        self._monitor.close()
        self.socket.close()


def check_answer(frame: bytes) -> None:
    """Raises: HandshakeRefused, if the server's first frame is not a `Welcome`."""
    try:
        answer = _answer.decode(frame)
    except ProtocolError as error:
        raise HandshakeRefused(f"the other side does not speak this protocol: {error}") from None
    if isinstance(answer, Refused):
        raise HandshakeRefused(answer.reason)
