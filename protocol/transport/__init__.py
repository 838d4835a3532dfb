"""Sockets between services: a ROUTER that binds and DEALERs that connect. Frames and handshakes only.

No message is dropped silently. The errors:

    ProtocolError (protocol.codec)  a peer violated the protocol; the error is counted and the socket stays open
    PeerGone                        the other side is not connected any more
    PeerSlow                        the other side does not read; its queue is full
    HandshakeRefused                the server refuses the connection; a retry cannot help
    HandshakeTimeout                the server did not answer
    Expelled                        the server has ended a connection that it had accepted (asyncio only)

A lost connection is never restored by libzmq alone, because messages in flight would be lost without an error; the
service makes a new one. Neither `Server` nor `Client` may be shared between threads; every thread that sends has a
`Client` of its own. `protocol.transport.aio` is the client for asyncio.
"""

from protocol.fields import MAX_IPC_PATH
from protocol.security import LOCAL, Security
from protocol.transport.client import Client
from protocol.transport.endpoint import check_endpoint, check_publisher
from protocol.transport.errors import Expelled, HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.server import Server
