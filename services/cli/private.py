"""A directory for this user only. It goes with the process, or, if that was killed, when the next one makes its own."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "runahead-serve-"


@contextmanager
def private_directory(base: Path) -> Iterator[Path]:
    """In `base`. Whoever uses one holds its lock; the kernel lets go of it however a process ends."""
    _sweep(base)
    path, lock = _make(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        with suppress(FileNotFoundError):  # swept before it was locked
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def _sweep(base: Path) -> None:
    """What nobody uses any more of this user's; there may be keys in it."""
    for path in base.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another sweeps too, or it is in use, or another user's
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(directory).st_uid == os.geteuid():
                    fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(directory)
