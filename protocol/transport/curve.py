"""CURVE on tcp: both sides are authenticated by their keys, and the connection is encrypted.

Every server has a ZeroMQ context of its own, whose authenticator (ZAP, RFC 27) runs in a thread. It accepts the keys of
the server's roles alone, and libzmq adds the role of the key to every frame as its User-Id.
"""

import logging
from collections.abc import Collection
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from protocol.security import SERVER, client_keys, public_roles, server_pair

log = logging.getLogger("runahead.transport")

DOMAIN = "runahead"


class RoleAuthenticator(ThreadAuthenticator):
    """Authenticator whose User-Id is the role of the key. The files of keys are read at every connection."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", directory: Path, roles: Collection[str]) -> None:
        super().__init__(context, log=log.getChild("curve"))
        self._directory, self._roles = directory, roles
        self.start()
        self.configure_curve_callback(DOMAIN, self)

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self.role_of(z85.encode(client_public_key)) or ""

    def callback(self, domain: str, key: bytes) -> bool:
        return self.role_of(key) is not None

    def role_of(self, key: bytes) -> str | None:
        """Return the role of a public key (z85), or None if it may not connect."""
        try:
            role = public_roles(self._directory).get(key)
        except OSError as error:
            log.error("no peer can connect: the allowed keys cannot be read: %s", error)
            return None
        return role if role in self._roles else None


class SecureContext:
    """A ZeroMQ context whose servers accept only keys of `roles`. It has its own thread."""

    def __init__(self, keys: Path, roles: Collection[str], binds_as: str = SERVER) -> None:
        """Raises: OSError, if a key is missing or invalid."""
        self._pair = server_pair(keys, binds_as)
        public_roles(keys)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = RoleAuthenticator(self.context, keys, roles)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set the keys of a server's socket. Call it before bind."""
        socket.curve_publickey, socket.curve_secretkey = self._pair
        socket.curve_server = True
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        # Without it, a missing authenticator would accept every client.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def close(self) -> None:
        """Close the context. All its sockets must be closed."""
        self._authenticator.stop()
        self.context.term()


def secure_client(socket: zmq.Socket[bytes], keys: Path, server_key: str = "") -> None:
    """Set the keys of a client's socket. Call it before connect. Raises: OSError, if a key is missing or invalid."""
    pair, socket.curve_serverkey = client_keys(keys, server_key)
    socket.curve_publickey, socket.curve_secretkey = pair
