"""CURVE keys for tcp: both sides prove who they are, and nobody in between can read.

Files are those of `zmq.auth.create_certificates`: NAME.key holds a public key, NAME.key_secret a pair.
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
    """The server's own pair."""
    clients: Path
    """Directory of the public keys (*.key) that may connect. Read at every connection: a change needs no restart."""


@dataclass(frozen=True)
class ClientKeys:
    secret: Path
    """The client's own pair."""
    server: Path
    """The server's public key."""


class _Allowed:
    """Asked by the authenticator's thread about each connection."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def callback(self, domain: str, key: bytes) -> bool:
        from zmq.auth import load_certificates

        try:
            return key in load_certificates(self._directory)
        except (OSError, ValueError) as error:
            log.error("nobody can connect: the allowed keys cannot be read: %s", error)
            return False


class Authenticator:
    """A context whose servers admit only the keys of `keys.clients`; libzmq asks in a thread of its own."""

    def __init__(self, keys: ServerKeys) -> None:
        """Raises: OSError, ValueError, when a key is missing or is no key"""
        # Here, because they bring asyncio, which a service without keys does not need.
        from zmq.auth import load_certificates
        from zmq.auth.thread import ThreadAuthenticator

        self._pair = _pair(keys.secret)
        load_certificates(keys.clients)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = ThreadAuthenticator(self.context, log=log.getChild("curve"))
        self._thread.start()
        self._thread.configure_curve_callback(DOMAIN, _Allowed(keys.clients))

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Before bind."""
        socket.curve_publickey, socket.curve_secretkey = self._pair
        socket.curve_server = True
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without it, no authenticator would mean everyone

    def close(self) -> None:
        """After every socket of the context."""
        self._thread.stop()
        self.context.term()


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Before connect. Raises: OSError, ValueError, when a key is missing or is no key"""
    from zmq.auth import load_certificate

    socket.curve_publickey, socket.curve_secretkey = _pair(keys.secret)
    socket.curve_serverkey = load_certificate(keys.server)[0]


def _pair(file: Path) -> tuple[bytes, bytes]:
    from zmq.auth import load_certificate

    public, secret = load_certificate(file)
    if secret is None:
        raise ValueError(f"{file} holds no secret key; it ends in .key_secret")
    return public, secret
