"""Keys of one process: it makes its pair itself, and no secret leaves it. Actors exchange public keys only."""

import hashlib
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.security import PUBLIC, SERVER, Security
from services.cli.transport_keys import make_pair
from services.private import private_directory, write_whole

Z85 = re.compile(r"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
"""Public key."""
PREFIX = "runahead-ray-"


class KeyDirectory:
    """Private directory with this process's pair and the public keys of its peers."""

    def __init__(self, directory: Path, role: str) -> None:
        self.path = directory
        self.public_key = make_pair(directory, role)

    @property
    def security(self) -> Security:
        return Security(self.path)

    def admit(self, role: str, public_key: str) -> None:
        """Let a peer connect, or, for the role of the server, connect to it. Raises: ValueError"""
        if not Z85.fullmatch(public_key):
            raise ValueError(f"the public key of a {role} has 40 characters of Z85, not {public_key[:80]!r}")
        suffix = "" if role == SERVER else f"-{hashlib.sha256(public_key.encode()).hexdigest()[:16]}"
        file, text = self.path / f"{role}{suffix}{PUBLIC}", f'curve\n    public-key = "{public_key}"\n'
        if not file.exists() or file.read_text() != text:
            write_whole(file, text)


@contextmanager
def key_directory(role: str) -> Iterator[KeyDirectory]:
    with private_directory(Path(tempfile.gettempdir()), PREFIX) as directory:
        yield KeyDirectory(directory, role)
