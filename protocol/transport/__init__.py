"""Sockets between services: one ROUTER that binds, many DEALERs that connect. Bytes and handshakes, no rules.

Nothing drops silently. What can happen, and who is told:

    ProtocolError (protocol.codec)  a peer sent what the protocol does not allow; counted, the socket goes on
    PeerGone                        the other side is not connected (any more)
    PeerSlow                        the other side does not read; its queue is full
    HandshakeRefused                the server does not want this connection; retrying cannot help
    HandshakeTimeout                nobody answered

A connection is made once: it is never taken up again behind the service's back, where messages in flight would be lost
unseen. Neither `Server` nor `Client` may be shared between threads; a thread that sends has a `Client` of its own.
The asyncio side is `protocol.transport.aio`.
"""

from protocol.transport.client import Client
from protocol.transport.curve import ClientKeys, ServerKeys
from protocol.transport.endpoint import MAX_IPC_PATH, check_endpoint
from protocol.transport.errors import HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.server import Server

__all__ = [
    "MAX_IPC_PATH",
    "Client",
    "ClientKeys",
    "HandshakeRefused",
    "HandshakeTimeout",
    "PeerGone",
    "PeerSlow",
    "Server",
    "ServerKeys",
    "check_endpoint",
]
