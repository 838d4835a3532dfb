"""What happens to a socket's connections, as events that can be polled and read without waiting."""

import struct
from collections.abc import Iterator

import zmq

FAILURES = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the other side hung up; it may not accept our key",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "no ZeroMQ peer, or keys on one side only, or the wrong keys",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the key is not on the list of those allowed",
}
"""Connections that never came about, and the likely reason."""
FINAL = {zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH}
"""Those after which libzmq does not try again."""


class Monitor:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        events = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        for failure in FAILURES:
            events |= failure
        self._watched = socket
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        """Readable when `read` has something to say."""
        self.socket.linger = 0

    def read(self) -> Iterator[zmq.Event]:
        """What happened since the last call, oldest first."""
        while True:
            try:
                event, _address = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            yield zmq.Event(struct.unpack("=Hi", event)[0])

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close()
