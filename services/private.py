"""Private directories: of a process, for its user only, and the user's cache.

That of a process is removed when the process ends. If the process was killed, the next one that makes a directory
removes it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EACCES
from pathlib import Path

from protocol.fields import MAX_IPC_PATH

KEPT_DAYS = 30
"""Days without use after which a directory of a cache is removed."""


@contextmanager
def private_directory(base: Path, prefix: str) -> Iterator[Path]:
    """Make a private directory in `base`, and remove those of processes that have ended.

    A process holds a lock on its directory, which the kernel releases when the process ends in any way. Only
    directories with the same prefix are removed.
    """
    sweep(base, prefix)
    path, lock = _make(base, prefix)
    maker = os.getpid()
    try:
        yield path
    finally:
        if os.getpid() == maker:  # not a forked child, in which this context ends too
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def write_whole(file: Path, text: str) -> None:
    """Replace a file that others read at any time: they find the old text or the new one. Raises: OSError"""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def short_base(prefix: str, longest: str) -> Path:
    """Return a base in which a private directory with this prefix can hold a socket named `longest`.

    The kernel limits the length of a socket's path.
    """
    room = MAX_IPC_PATH - len(f"/{prefix}xxxxxxxx/{longest}")
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if base and len(os.fsencode(base)) <= room and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    return Path("/tmp")  # noqa: S108  only a directory inside it is used, which is private


def user_cache() -> Path:
    """Return the user's directory for files that can be made again."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache == "~/.cache":  # this user has no home, and writes nowhere
        cache = "/nonexistent"
    return Path(cache, "runahead")


def without_unused(place: Path, pattern: str, counts_reads: bool = False) -> Path:
    """Mark a directory of a cache as used, if it exists, and remove those beside it that match the pattern and were not
    used for `KEPT_DAYS`. Each is renamed first: if this process is killed, none lacks files. Return `place`.

    Args:
        counts_reads: a program that lists the files of a directory uses it, too.
    """
    for other in place.parent.glob(pattern):
        with suppress(OSError):
            status = other.stat()
            if other == place:
                os.utime(place)
            elif max(status.st_mtime, status.st_atime if counts_reads else 0.0) < time.time() - KEPT_DAYS * 86400:
                shutil.rmtree(other.rename(f"{other}-removed"))
    return place


def make_private(directory: Path) -> None:
    """Make a directory for this user only. Raises: OSError, also if it exists and cannot be read, or `check_private`"""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    if not os.access(directory, os.R_OK | os.X_OK):
        raise PermissionError(EACCES, os.strerror(EACCES))


def make_output(directory: Path) -> None:
    """Make a directory for files that nobody but this user may read. It may be of another user, as one that is mounted
    for root. Raises: OSError, also if it exists and others can read it, or it cannot be written"""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) & 0o077:
        raise PermissionError(EACCES, f"others can read the directory; chmod 700 {directory}")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(EACCES, "the directory cannot be written")


def make_shared(directory: Path) -> None:
    """Make a directory that processes share, of this user if it is new. Raises: OSError, also if files in it cannot be
    written and locked"""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_private(directory: Path) -> None:
    """Raises: OSError, if the directory is missing, of another user, or others have access to it."""
    status = directory.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(EACCES, "other users have access to it; chmod 700 it, or give a directory of this user")


def _make(base: Path, prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        with suppress(FileNotFoundError):  # another process removed it before it was locked
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def sweep(base: Path, prefix: str) -> None:
    """Remove this user's directories in `base` whose processes have ended. They may contain API keys."""
    for path in base.glob(f"{prefix}*"):
        with suppress(OSError):  # in use, of another user, or being removed by another process
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(directory).st_uid == os.geteuid():
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(directory)
