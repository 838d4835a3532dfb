"""A keeper over its real socket: who gets which memory, and when it is freed."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest

from services import kv_keeper
from services.kv_keeper import Keeper, KeptMemory, keeping
from tests.waiting import wait_until

ONE, OTHER = b"1" * 32, b"2" * 32
LONG = 1e6


@contextmanager
def keeper(path: Path, seconds: float = LONG) -> Iterator[None]:
    stop, end = socket.socketpair()
    thread = threading.Thread(target=Keeper(path, seconds).run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        end.close()
        thread.join()
        stop.close()


def num_kept() -> int:
    """Return the number of memories that this process has open."""
    return sum(
        "memfd:runahead-kv" in os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def left(path: Path, data: bytes, digest: bytes = ONE) -> None:
    """A worker writes this and is killed."""
    code = f"""
import os, signal
from services.kv_keeper import KeptMemory
memory = KeptMemory({str(path)!r})
os.write(memory.claim({digest!r}), {data!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False)
    assert ended.returncode == -signal.SIGKILL


class ClaimingRank(KeptMemory):
    """A worker of this process. The kernel closes its connection when it ends, as the context does here."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.connections = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connections.close()

    def connected(self) -> socket.socket:
        return self.connections.enter_context(super().connected())

    def found(self, digest: bytes = ONE) -> bytes:
        """Return the content of the claimed memory."""
        descriptor = self.claim(digest)
        data = os.pread(descriptor, 100, 0)
        os.close(descriptor)
        return data


def found(path: Path, digest: bytes = ONE) -> bytes:
    """Return what a worker finds that ends at once."""
    with ClaimingRank(path) as worker:
        return worker.found(digest)


def test_the_next_worker_gets_what_a_killed_one_has_left(path: Path) -> None:
    with keeper(path):
        assert path.stat().st_mode & 0o777 == 0o600
        left(path, b"one")
        with ClaimingRank(path) as first:
            assert first.found() == b"one"
            assert found(path) == b"", "nobody gets memory that a worker has"
        with ClaimingRank(path) as second:
            assert second.found() == b"one"
            assert second.found(OTHER) == b"", "it uses another cache now"
            assert found(path) == b"", "and the one before is freed"


def test_memory_is_freed_for_a_cache_that_is_not_there(path: Path) -> None:
    with keeper(path):
        left(path, b"one")
        assert found(path, OTHER) == b""
        assert found(path) == b""


def test_a_drop_reaches_memory_without_a_worker(path: Path) -> None:
    with keeper(path):
        left(path, b"one")
        ClaimingRank(path).drop()
        assert found(path) == b""
    ClaimingRank(path).drop()  # the keeper has ended: nothing is kept


def test_where_no_keeper_of_this_user_can_be_nothing_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker serves on without one, and its blocks can be dropped."""
    path.touch()
    KeptMemory(os.fspath(path / "file")).drop()

    def refuse(_: KeptMemory) -> socket.socket:  # as root connects to any socket
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(KeptMemory, "connected", refuse)
    KeptMemory(os.fspath(path)).drop()


def test_a_drop_for_which_the_keeper_has_no_room_is_not_confirmed(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stopped, ClaimingRank(path) as first:
        stopped.bind(os.fspath(path))
        stopped.listen(0)
        first.connect()
        with pytest.raises(TimeoutError):
            ClaimingRank(path).drop()


def test_a_keeper_without_room_for_a_connection_has_not_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_keeper, "MAX_CONNECTIONS", 1)
    with keeper(path):
        left(path, b"one")
        with ClaimingRank(path) as worker:
            worker.connect()
            with pytest.raises(TimeoutError, match="the keeper does not answer"):
                KeptMemory(os.fspath(path)).drop()
            assert worker.found() == b"one"


def test_memory_without_a_worker_is_freed_after_some_time(path: Path) -> None:
    with keeper(path, seconds=0.05):
        with ClaimingRank(path) as loads:
            loads.connect()
            left(path, b"one")
            assert loads.found() == b"one", "the time does not run while a worker loads"
        wait_until(lambda: num_kept() == 0, "nothing is kept")


def test_a_worker_outlives_its_keeper(path: Path) -> None:
    with ClaimingRank(path) as worker:
        with keeper(path):
            assert worker.found() == b""
            with pytest.raises(OSError, match="another service is using it"):
                Keeper(path, LONG)
        with pytest.raises(OSError, match="No such file"):
            worker.claim(OTHER)
        with keeper(path):
            assert worker.found() == b"", "it finds the next keeper"
    assert num_kept() == 0


def test_nonsense_ends_its_connection_only(path: Path) -> None:
    with keeper(path):
        left(path, b"one")
        with ClaimingRank(path) as worker, worker.connected() as peer:
            peer.sendall(b"nonsense")
            assert peer.recv(1) == b""
            assert worker.found() == b"one"


def test_a_system_without_such_memory_serves_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with keeping(tmp_path, LONG) as environment:
        assert environment == {}
