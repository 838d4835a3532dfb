"""The directory of compiled kernels, so that only the first start on a machine compiles them (up to a minute).

numba compares a compiled kernel only with the source file that defines it, but kernels share functions of several
files. The directory's name therefore contains a digest of all files.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from services.private import private_directory, user_cache, without_unused

PRIVATE = "runahead-kernels-"
"""First part of the name of a directory that one process uses."""
KERNELS = "kernels-*"
"""Directories of all versions. numba makes one again that a process still uses."""


def directory() -> Path:
    """Return NUMBA_CACHE_DIR if it is set; else a directory beside the kernels or in the user's cache directory; or,
    if neither can be written, a private one that is deleted when this process ends.

    numba reads and writes the same directory. Kernels that another user or a read-only image compiled beside the
    sources are therefore copied to a directory that can be written."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.rglob("*.py")))).hexdigest()[:16]
    beside, cached = here / "__pycache__" / f"kernels-{digest}", user_cache() / f"kernels-{digest}"
    if is_writable(beside):
        return without_unused(beside, KERNELS)
    if not cached.exists():
        copy_compiled(beside, cached)
    if is_writable(cached):
        return without_unused(cached, KERNELS)
    held = ExitStack()
    private = held.enter_context(private_directory(Path(tempfile.gettempdir()), PRIVATE))
    atexit.register(held.close)
    if beside.is_dir():
        shutil.copytree(beside, private, dirs_exist_ok=True)
    return private


def copy_compiled(compiled: Path, place: Path) -> None:
    """Copy a directory of compiled kernels completely or not at all, because several workers may start at once."""
    if not compiled.is_dir():
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=PRIVATE, dir=place.parent) as scratch:
            shutil.copytree(compiled, Path(scratch) / "copy")
            (Path(scratch) / "copy").rename(place)
    except OSError:  # nothing can be written here, or another worker was first
        return


def is_writable(place: Path) -> bool:
    """Create a directory if needed. Return whether files can be created in it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(place, os.W_OK | os.X_OK)
