"""What goes wrong between two services; see the package for the whole list."""


class PeerGone(Exception):
    """The other side is not connected (any more)."""


class PeerSlow(Exception):
    """The other side does not read; its queue is full."""


class HandshakeRefused(Exception):
    """The other side does not want this connection; the text is its reason. Retrying cannot help."""


class HandshakeTimeout(Exception):
    """Nobody answered."""
