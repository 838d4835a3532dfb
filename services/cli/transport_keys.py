"""`runahead keys DIR`: a pair of CURVE keys for each role, and the public keys that each role needs."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.security import PUBLIC, SECRET, SERVER
from services.cli.settings import ConfigurationError, refusing_os_errors
from services.config import SERVICES

CLIENTS = tuple(sorted(set(SERVICES) - {SERVER}))


def make_keys(directory: Path) -> str:
    """Write `directory/ROLE` for each role and return a line about it. Keys that are complete stay as they are.

    Files have mode 0600, new directories 0700.

    Raises: ConfigurationError, if some keys exist and others do not, or the directory cannot be written.
    """
    expected = [directory / role / name for role in SERVICES for name in _files(role)]
    present = [path for path in expected if path.exists()]
    if len(present) == len(expected):
        return f"{directory} contains keys already; they are kept"
    if present:
        missing = next(path for path in expected if path not in present)
        raise ConfigurationError(
            f"{directory} contains some keys, but {missing} is missing; remove them, and all keys are made anew"
        )
    with refusing_os_errors(f"cannot write keys to {directory}: "), _private_files():
        _write(directory)
    roles = ", ".join(SERVICES)
    return f"{directory} contains the keys of {roles}; give each service its own directory as --transport-keys"


def make_pair(directory: Path, role: str) -> str:
    """Write one pair of keys to an existing directory and return the public key."""
    from zmq.auth import create_certificates, load_certificate

    with _private_files():
        public, _ = create_certificates(directory, role)
    return load_certificate(public)[0].decode()


def _files(role: str) -> tuple[str, ...]:
    """Return the names of a role's files: its own pair, and the public keys of its peers."""
    others = (*CLIENTS, SERVER) if role == SERVER else (SERVER,)
    return (role + SECRET, *(other + PUBLIC for other in others))


def _write(directory: Path) -> None:
    # Imported here because it imports asyncio, which no other command needs.
    from zmq.auth import create_certificates

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for role in SERVICES:
            create_certificates(scratch, role)
        for role in SERVICES:
            own = directory / role
            own.mkdir(exist_ok=True)
            for name in _files(role):
                shutil.copyfile(Path(scratch) / name, own / name)


@contextmanager
def _private_files() -> Iterator[None]:
    """Give no permission to others on what is created."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
