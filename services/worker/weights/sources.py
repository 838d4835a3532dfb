"""Identity of the sources of packed weights: the files of a checkpoint, and the code that packs them."""

import hashlib
from functools import cache
from pathlib import Path

from services.checkpoint import is_gguf, weight_shards

_SERVICES = Path(__file__).parents[2]
_PACKING = ("checkpoint", "worker/kernels", "worker/weights", "worker/backends/native/model")
"""Packages that choose, read, cut, order, round and pack weights."""


def source_identity(path: Path) -> str:
    """Return a text that changes when a file of weights is replaced or written: path, size, times of the last change of
    content and of the inode, and inode of each. Nothing is read.

    Raises: CheckpointError or OSError, if a file is missing.
    """
    files = [path] if is_gguf(path) else weight_shards(path)
    found = [(str(file.resolve()), file.stat()) for file in files]
    return " ".join(f"{name} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns} {s.st_ino}" for name, s in found)


@cache
def packing_digest() -> str:
    """Return a digest of the code."""
    digest = hashlib.sha256()
    for package in _PACKING:
        for path in sorted((_SERVICES / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
