"""Sockets between services: a ROUTER that binds and DEALERs that connect. Frames and handshakes only.

No message is dropped silently: `errors` has what is raised in its place. A `ProtocolError` of a peer is counted, and
the socket stays open.

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
