"""Errors of a connection between services. The package's docstring lists them all."""


class PeerGone(Exception):
    """The other side is not connected any more."""


class PeerSlow(Exception):
    """The other side does not read; its queue is full."""


class HandshakeRefused(Exception):
    """The other side refuses the connection; the text is its reason. A retry cannot help."""


class HandshakeTimeout(Exception):
    """The other side did not answer."""
