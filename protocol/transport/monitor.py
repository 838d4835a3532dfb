"""Events of a socket's connections, which can be polled and read without waiting."""

import struct
from collections.abc import Iterator
from contextlib import suppress

import zmq

FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the other side closed the connection; it may not accept our key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the other side is no ZeroMQ socket, or the keys do not match",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the key is not one of the allowed keys",
}
"""Failed connection attempts and the likely reason."""
FINAL = {zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH}
"""Failures after which libzmq does not retry."""


class Monitor:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        events = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        for failure in FAILURES:
            events |= failure
        self._watched = socket
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        """Readable when `read` has events."""
        self.socket.linger = 0

    def read(self) -> Iterator[zmq.Event]:
        """Yield the events since the last call, oldest first."""
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            event, _address = self.socket.recv_multipart()
            yield zmq.Event(struct.unpack("=Hi", event)[0])

    def close(self) -> None:
        with suppress(zmq.ContextTerminated):  # the process ends
            self._watched.disable_monitor()
        self.socket.close()
