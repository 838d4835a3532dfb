"""The connecting side of a socket."""

import math
import time
from contextlib import suppress

import msgspec
import zmq

from protocol.codec import Decoder, ProtocolError, encode
from protocol.handshake import PROTOCOL_VERSION, Hello, Refused, Welcome
from protocol.security import LOCAL, Security
from protocol.transport.endpoint import check_endpoint, configure, ipc_path
from protocol.transport.errors import HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.monitor import FAILURES, FINAL, Monitor

SEND_TIMEOUT_MS = 10_000
"""Maximum time that `send` waits for room in the queue."""

_answer: Decoder[Welcome | Refused] = Decoder(Welcome | Refused)
_REFUSED = encode(Refused(""))[:-1]
"""Common prefix of every `Refused`."""


class Client:
    """A connection to one server. Must not be shared between threads."""

    def __init__(self, endpoint: str, security: Security = LOCAL) -> None:
        """Raises: ValueError, if the endpoint is invalid; OSError, if the keys cannot be read."""
        self.endpoint = check_endpoint(endpoint, security)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._monitor = Monitor(self.socket)
        self._connected = False
        """There was a connection."""
        self._broken = False
        """The connection was lost; frames may still be unread."""
        self._gone = False
        """The connection was lost and all frames were read."""
        self._made_again = False
        """libzmq has made another connection in place of the lost one, before that loss was seen here."""
        self._rejected = False
        """libzmq has given up the connection."""
        self._failure = ""
        try:
            configure(self.socket, endpoint)
            self.socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
            if security.keys is not None and ipc_path(endpoint) is None:
                # Imported here because it imports asyncio, which a service without keys may not need.
                from protocol.transport.curve import secure_client

                secure_client(self.socket, security.keys, security.server_key)
            self.socket.connect(endpoint)
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self.socket, self._monitor.socket):
            self._poller.register(source, zmq.POLLIN)

    def handshake(self, role: str, name: str, timeout: float) -> None:
        """Send a `Hello` and wait up to `timeout` seconds for the answer.

        Raises: HandshakeRefused, HandshakeTimeout, PeerGone
        """
        self.send_hello(role, name)
        frame = self.receive(timeout)
        if frame is None:
            raise self.timeout_error(timeout)
        self.check_welcome(frame)

    def send_hello(self, role: str, name: str) -> None:
        """First half of `handshake`; `check_welcome` is the second."""
        # Without room before the first message the connection has failed; `receive` raises the error.
        with suppress(PeerSlow):
            self.send(Hello(*PROTOCOL_VERSION, role, name), wait=False)

    def send(self, message: msgspec.Struct, wait: bool = True) -> None:
        """Send a message, waiting up to 10 s for room in the queue if `wait`.

        Raises: PeerSlow, if the queue is full; PeerGone, after `receive` has raised it, so that all frames that the
            server sent before it left are read first.
        """
        if self._gone:
            raise PeerGone(f"{self.endpoint} closed the connection")
        try:
            self.socket.send(encode(message), 0 if wait else zmq.DONTWAIT)
        except zmq.Again:
            raise PeerSlow(f"{self.endpoint} does not read") from None

    def receive(self, timeout: float | None = None) -> bytes | None:
        """Return the next frame, or None after `timeout` seconds without one. None: no limit.

        Raises: PeerGone, if the server has left and all its frames were read; HandshakeRefused, if it refuses the
            connection or has another protocol.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (frame := self.receive_now()) is None:
            left = None if deadline is None else math.ceil(1000 * (deadline - time.monotonic()))
            if left is not None and left <= 0:
                return None
            self._poller.poll(left)
        return frame

    def receive_now(self) -> bytes | None:
        """`receive` without waiting."""
        while ready := self._poller.poll(0):  # the socket is the first in it
            if ready[0][0] is self._monitor.socket:
                self._read_events()  # frames that arrived before a loss are readable at the next look
            elif frame := self.socket.recv(zmq.DONTWAIT):  # an empty one is a check of the connection
                if frame.startswith(_REFUSED):
                    self._read_events()
                    if self._made_again:  # a message was the first one on it, and the server expects a Hello there
                        break
                    self.check_welcome(frame)
                return frame
        if self._broken:
            self._gone = True
            raise PeerGone(f"{self.endpoint} closed the connection")
        if self._rejected:
            raise HandshakeRefused(f"no connection to {self.endpoint}: {self._failure}")
        return None

    @staticmethod
    def check_welcome(answer: bytes) -> None:
        """Handle the server's answer to a `Hello`. Raises: HandshakeRefused, if it is not a `Welcome`."""
        try:
            message = _answer.decode(answer)
        except ProtocolError as error:
            raise HandshakeRefused(f"the other side has another protocol: {error}") from None
        if isinstance(message, Refused):
            raise HandshakeRefused(message.reason)

    def _read_events(self) -> None:
        for event in self._monitor.read():
            if event in FAILURES:
                self._failure = FAILURES[event]
                self._rejected |= event in FINAL
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected, self._made_again = True, self._broken
            else:
                # For good: on a new connection this client would be unknown to the server, and a second Hello with
                # the same name would be refused until the server has noticed the loss.
                self._broken |= self._connected

    def timeout_error(self, timeout: float) -> HandshakeTimeout:
        text = f"no answer from {self.endpoint} within {timeout:g} s"
        return HandshakeTimeout(f"{text}: {self._failure}" if self._failure else text)

    @property
    def fds(self) -> tuple[int, int]:
        """File descriptors for an event loop. Call `receive_now` when one is readable, and after each `send`."""
        return int(self.socket.fd), int(self._monitor.socket.fd)

    def close(self) -> None:
        if self.socket.closed:
            return
        with suppress(zmq.ContextTerminated):  # the process ends
            self._read_events()
        self._monitor.close()
        # After a loss, libzmq would send what it still has to the next server, which expects a Hello.
        self.socket.close(0 if self._broken else None)
