"""CURVE keys for tcp: both sides are authenticated and the connection is encrypted.

The files are those of `zmq.auth.create_certificates`: NAME.key holds a public key, NAME.key_secret a pair of keys.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import zmq

log = logging.getLogger("runahead.transport")

DOMAIN = "runahead"


@dataclass(frozen=True)
class ServerKeys:
    secret: Path
    """File with the server's own pair."""
    clients: Path
    """Directory of the public keys (*.key) that may connect. It is read at every connection, so no change needs a
    restart."""


@dataclass(frozen=True)
class ClientKeys:
    secret: Path
    """File with the client's own pair."""
    server: Path
    """File with the server's public key."""


class _AllowedKeys:
    """Callback of the authenticator's thread for each connection."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def callback(self, domain: str, key: bytes) -> bool:
        from zmq.auth import load_certificates

        try:
            return key in load_certificates(self._directory)
        except (OSError, ValueError) as error:
            log.error("no peer can connect: the allowed keys cannot be read: %s", error)
            return False


class Authenticator:
    """A ZeroMQ context whose servers accept only the keys of `keys.clients`. It has its own thread."""

    def __init__(self, keys: ServerKeys) -> None:
        """Raises: OSError, ValueError, if a key is missing or invalid."""
        # Imported here because they import asyncio, which a service without keys does not need.
        from zmq.auth import load_certificates
        from zmq.auth.thread import ThreadAuthenticator

        self._pair = _pair(keys.secret)
        load_certificates(keys.clients)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = ThreadAuthenticator(self.context, log=log.getChild("curve"))
        self._thread.start()
        self._thread.configure_curve_callback(DOMAIN, _AllowedKeys(keys.clients))

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a server's socket. Call it before bind."""
        socket.curve_publickey, socket.curve_secretkey = self._pair
        socket.curve_server = True
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(
            zmq.ZAP_ENFORCE_DOMAIN, 1
        )  # without it, a missing authenticator would accept every client

    def close(self) -> None:
        """Close the context. All its sockets must be closed."""
        self._thread.stop()
        self.context.term()


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Set the keys of a client's socket. Call it before connect.

    Raises: OSError, ValueError, if a key is missing or invalid.
    """
    from zmq.auth import load_certificate

    socket.curve_publickey, socket.curve_secretkey = _pair(keys.secret)
    socket.curve_serverkey = load_certificate(keys.server)[0]


def _pair(file: Path) -> tuple[bytes, bytes]:
    from zmq.auth import load_certificate

    public, secret = load_certificate(file)
    if secret is None:
        raise ValueError(f"{file} contains no secret key; use the file that ends in .key_secret")
    return public, secret
