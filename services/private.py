"""A directory for this user only. It goes with the process, or, if that was killed, when the next one makes its own."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from protocol.transport import MAX_IPC_PATH


@contextmanager
def private_directory(base: Path, prefix: str) -> Iterator[Path]:
    """In `base`. Whoever uses one holds its lock; the kernel lets go of it however a process ends.

    Args:
        prefix: of its name; only what begins like it is swept
    """
    sweep(base, prefix)
    path, lock = _make(base, prefix)
    maker = os.getpid()
    try:
        yield path
    finally:
        if os.getpid() == maker:  # not a fork, which ends this too
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def short_base(prefix: str, longest: str) -> Path:
    """Where the path of a private directory with that prefix is short enough for a socket in it with that name."""
    room = MAX_IPC_PATH - len(f"/{prefix}xxxxxxxx/{longest}")
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if base and len(os.fsencode(base)) <= room and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    return Path("/tmp")  # noqa: S108  only a directory inside it is used, which is private


def _make(base: Path, prefix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        with suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def sweep(base: Path, prefix: str) -> None:
    """Remove this user's private directories in `base` whose processes are dead; there may be keys in them."""
    for path in base.glob(f"{prefix}*"):
        with suppress(OSError):  # another sweeps too, or it is in use, or another user's
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(directory).st_uid == os.geteuid():
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(directory)
