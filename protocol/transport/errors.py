"""Errors of a connection between services, beside `ProtocolError` (protocol.codec)."""


class PeerGone(Exception):
    """The other side is not connected any more."""


class PeerSlow(Exception):
    """The other side does not read; its queue is full."""


class HandshakeRefused(Exception):
    """The other side refuses the connection; the text is its reason. A retry cannot help."""


class Expelled(Exception):
    """The other side has ended a connection that it had accepted, for a message that it could not read. Only
    `protocol.transport.aio` distinguishes it from `HandshakeRefused`."""


class HandshakeTimeout(Exception):
    """The other side did not answer."""
