"""Shared memory of ranks: names exist while the groups form, pages while the epoch lasts; also if ranks are killed."""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from torch import distributed

from services.worker.backends.vllm import shared_memory
from services.worker.backends.vllm.shared_memory import PREFIX, VllmSharedMemory, sweep_shared_memory

SIZE = 1 << 16
"""Bytes of a rank's file."""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in /dev/shm that is used in its place."""
    with tempfile.TemporaryDirectory(dir=shared_memory.DIRECTORY) as path:
        monkeypatch.setattr(shared_memory, "DIRECTORY", Path(path))
        yield Path(path)


def form(name: Connection, end: Connection) -> None:
    """Run a first rank whose groups form until a message arrives at `end`."""
    memory = VllmSharedMemory()
    shared = memory.agree(distributed.HashStore(), 0)
    os.close(create(shared_memory.DIRECTORY, shared, 0))
    name.send(shared)
    end.poll(None)
    memory.remove_names()


def forming() -> tuple[BaseProcess, str, Connection]:
    """Start a process that runs `form`. Returns it, the name that it shares, and the connection that ends it."""
    context = multiprocessing.get_context("fork")  # vLLM is imported already
    (name, name_of_child), (end_of_child, end) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    process = context.Process(target=form, args=(name_of_child, end_of_child))
    process.start()
    return process, name.recv(), end


def create(directory: Path, name: str, rank: int) -> int:
    """Create the file of a rank as vLLM does, and write all of it. Returns an open descriptor."""
    file = os.open(directory / f"{name}-tp:0-[0-1]-cpushm_{rank}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(file, b"x" * SIZE)
    return file


def names(directory: Path) -> set[str]:
    return set(os.listdir(directory))


def test_names_go_when_the_groups_are_formed_and_pages_when_the_epoch_ends(directory: Path) -> None:
    store, ranks, barrier = (distributed.HashStore(), (VllmSharedMemory(), VllmSharedMemory()), threading.Barrier(2))
    shared = [memory.agree(store, rank) for rank, memory in enumerate(ranks)]
    assert shared[0] == shared[1]
    files = [create(directory, shared[0], rank) for rank in range(2)]
    assert len(names(directory)) == 3
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda memory: memory.unlink(barrier.wait), ranks))
    assert names(directory) == set()
    assert [os.fstat(file).st_blocks * 512 for file in files] == [SIZE, SIZE]
    ranks[1].free()
    assert [os.fstat(file).st_blocks for file in files] == [0, 0]
    assert os.pread(files[0], 1, 0) == b"\0", "a rank that still reads gets zeros, and is not killed"
    ranks[0].free()
    for file in files:
        os.close(file)


def test_rank_on_another_machine_shares_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, first, second = distributed.HashStore(), VllmSharedMemory(), VllmSharedMemory()
    name = first.agree(store, 0)
    monkeypatch.setattr(shared_memory, "machine", lambda: "another")
    assert second.agree(store, 1) != name
    second.unlink(lambda: None)
    assert names(directory) == {name}
    first.remove_names()
    assert names(directory) == set()


def test_killed_process_is_swept_and_a_living_one_stays(directory: Path) -> None:
    """Files of other programs stay too, such as Python's own shared memory."""
    others = {"psm_0a1b2c3d", "4711.0-tp:0-[0-1]-cpushm_0", "runahead-serve-abcdefgh"}
    for other in others:
        (directory / other).touch()
    living, used, end = forming()
    killed, left, _ = forming()
    os.close(create(directory, left, 1))
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert len([name for name in names(directory) if name.startswith(left)]) == 3
    sweep_shared_memory()
    assert names(directory) == others | {used, f"{used}-tp:0-[0-1]-cpushm_0"}
    end.send(None)
    living.join()
    assert living.exitcode == 0
    assert names(directory) == others


def test_rank_whose_first_rank_was_killed_removes_its_own_file(directory: Path) -> None:
    """It may create its file after the sweep that removed the directory of the first rank."""
    store, first, second = distributed.HashStore(), VllmSharedMemory(), VllmSharedMemory()
    name = first.agree(store, 0)
    assert second.agree(store, 1) == name
    first.remove_names()
    os.close(create(directory, name, 1))
    second.remove_names()
    assert names(directory) == set()


def test_file_without_a_directory_is_swept(directory: Path) -> None:
    """Its process was killed after the directory was removed."""
    os.close(create(directory, f"{PREFIX}abcdefgh", 1))
    sweep_shared_memory()
    assert names(directory) == set()
