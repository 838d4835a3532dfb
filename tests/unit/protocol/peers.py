"""Both ends of a connection."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import zmq

from protocol.codec import Decoder, encode
from protocol.handshake import PROTOCOL_VERSION, Hello
from protocol.membership import Heartbeat
from protocol.security import LOCAL, Security
from protocol.transport import Client, Server

PATIENCE = 60.0
"""Seconds without a frame after which a test fails."""

heartbeats: Decoder[Heartbeat] = Decoder(Heartbeat)

opened = ExitStack()
"""Clients of the test that runs; a fixture closes them at its end."""


def new_client(endpoint: str, security: Security = LOCAL) -> Client:
    client = Client(endpoint, security)
    opened.callback(client.close)
    return client


def arrived(server: Server) -> tuple[bytes, Hello | bytes]:
    """Return the next peer and frame of the server."""
    while (received := server.receive()) is None:
        assert server.socket.poll(1000 * PATIENCE), "nothing arrived"
    return received


def connect(server: Server, role: str = "worker", security: Security = LOCAL) -> tuple[Client, bytes]:
    """Return a client after its handshake, and its identity at the server."""
    client = new_client(server.endpoint, security)
    client.send(Hello(*PROTOCOL_VERSION, role, "test"))
    peer, hello = arrived(server)
    assert isinstance(hello, Hello)
    answer = client.receive(PATIENCE)
    assert answer is not None
    client.check_welcome(answer)
    return client, peer


def exchange(server: Server, client: Client, peer: bytes, number: int = 1) -> None:
    """Send a message in each direction."""
    client.send(Heartbeat(1, number))
    assert arrived(server) == (peer, encode(Heartbeat(1, number)))
    server.send(peer, Heartbeat(2, number))
    assert client.receive(PATIENCE) == encode(Heartbeat(2, number))


@contextmanager
def echoing(server: Server) -> Iterator[None]:
    """Run the server in a thread that sends every heartbeat back. The test must not use the server meanwhile."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            server.socket.poll(20)
            while (received := server.receive()) is not None:
                peer, frame = received
                if isinstance(frame, bytes):
                    server.send(peer, heartbeats.decode(frame))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def raw_dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket without a handshake."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        yield socket
