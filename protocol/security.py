"""Protection of tcp connections beyond loopback: CURVE keys, or the permission to have none.

Each service has a directory with its own pair of keys and the public keys of its peers (`runahead keys` makes them):

    scheduler/   scheduler.key_secret, and the public keys (*.key) that may connect
    frontend/    frontend.key_secret, scheduler.key
    worker/      worker.key_secret, scheduler.key

A key authenticates a role: the name of its file up to the first hyphen or dot. `worker.key` and `worker-2.key` are keys
of workers. The files are those of `zmq.auth.create_certificates`: NAME.key holds a public key, NAME.key_secret a pair.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

SERVER = "scheduler"
"""Role of the side that binds. A client with its key may only probe."""
PUBLIC, SECRET = ".key", ".key_secret"
"""Suffixes of the files."""
_EVERYBODY = 0o007


@dataclass(frozen=True)
class Security:
    """Protection of one service's connections. The default allows ipc and loopback only."""

    keys: Path | None = None
    """Directory with the keys of this service. It is read at every connection, so changes need no restart."""
    insecure: bool = False
    """Allow unencrypted tcp connections beyond loopback."""
    server_key: str = ""
    """Public key (z85) of the side that binds; "": that in the directory."""
    binds_as: str = SERVER
    """Role of the side that binds: the server of the others, or a worker that serves workers of other engines."""

    @property
    def encrypted(self) -> bool:
        """True if tcp connections are encrypted."""
        return self.keys is not None

    def with_server_key(self, key: str) -> "Security":
        """Return the same for a server with another public key; "": the same."""
        return replace(self, server_key=key) if key else self

    def check(self, is_server: bool) -> None:
        """Read every key that is needed. Raises: OSError, if one is missing, invalid or readable by every user."""
        if self.keys is not None:
            if is_server:
                server_pair(self.keys)
                public_roles(self.keys)
            else:
                client_keys(self.keys, self.server_key)


LOCAL = Security()


def key_role(role: str) -> str:
    """Return the role of the key that a peer with `role` needs. A worker has two connections and one key."""
    return role.partition("-")[0]


def public_roles(directory: Path) -> dict[bytes, str]:
    """Return the role of each public key (z85) in a directory, its own one included. Raises: OSError"""
    files = sorted(path for path in directory.iterdir() if path.suffix in (PUBLIC, SECRET))
    return {_read(path)[0]: key_role(path.name.partition(".")[0]) for path in files}


def server_pair(directory: Path, role: str = SERVER) -> tuple[bytes, bytes]:
    """Return the public and the secret key of the side that binds. Raises: OSError"""
    return _pair(directory / (SERVER + SECRET)) if role == SERVER else _own_pair(directory)


def _own_pair(directory: Path) -> tuple[bytes, bytes]:
    """Raises: OSError, unless the directory has one pair."""
    own = sorted(path for path in directory.iterdir() if path.suffix == SECRET)
    if len(own) != 1:
        found = ", ".join(path.name for path in own) or "none"
        raise OSError(f"{directory} must contain one file *{SECRET}, but contains {found}")
    return _pair(own[0])


def client_keys(directory: Path, server_key: str = "") -> tuple[tuple[bytes, bytes], bytes]:
    """Return a client's public and secret key, and the server's public key: `server_key`, or that in the directory.

    Raises: OSError
    """
    return _own_pair(directory), server_key.encode() or _read(directory / (SERVER + PUBLIC))[0]


def _pair(file: Path) -> tuple[bytes, bytes]:
    public, secret = _read(file)
    if secret is None:
        raise OSError(f"{file} contains no secret key")
    if os.stat(file).st_mode & _EVERYBODY:
        raise OSError(f"{file} must not be accessible to every user: chmod o= {file}")
    return public, secret


def _read(file: Path) -> tuple[bytes, bytes | None]:
    """Return the public key, and the secret one if the file has it. Raises: OSError"""
    # Imported here because it imports asyncio, which a service without keys may not need.
    from zmq.auth import load_certificate

    try:
        return load_certificate(file)
    except ValueError as error:
        raise OSError(str(error)) from None
