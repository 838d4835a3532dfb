"""The exchange of messages through shared memory, between threads and between processes."""

import os
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, HashStore, Store

from services.worker.distributed import shared_memory
from services.worker.distributed.shared_memory import CAPACITY, SharedMemory
from services.worker.runner import RanksLost

PATIENCE = 30.0
pytestmark = pytest.mark.skipif(not shared_memory.is_supported(), reason="the system has no such memory")


def join(size: int, store: Store | None = None) -> list[SharedMemory]:
    """The members of a group, joined by a thread each."""
    shared = store or HashStore()
    with ThreadPoolExecutor(size) as pool:
        joined = list(pool.map(lambda rank: SharedMemory.join(shared, rank, size), range(size)))
    assert all(memory is not None for memory in joined)
    return [memory for memory in joined if memory is not None]


def together(members: list[SharedMemory], work: Callable[[SharedMemory], object]) -> list[object]:
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, members))


def test_every_rank_reads_every_message_in_the_order_of_ranks() -> None:
    members = join(3)

    def work(memory: SharedMemory) -> list[list[float]]:
        values = []
        for number in range(200):
            x = torch.full((2, 3), float(100 * number + memory.rank))
            parts = memory.exchange(x)
            assert [part.shape for part in parts] == [x.shape] * 3
            values.append([float(part.sum()) / 6 for part in parts])
        return values

    expected = [[100.0 * number + rank for rank in range(3)] for number in range(200)]
    assert together(members, work) == [expected] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
def test_messages_have_any_dtype_and_size_up_to_the_capacity(dtype: torch.dtype) -> None:
    members = join(2)
    for count in (0, 1, 7, CAPACITY // dtype.itemsize):

        def work(memory: SharedMemory, count: int = count) -> list[torch.Tensor]:
            x = (torch.arange(count) % 100 + memory.rank).to(dtype)
            return [part.clone() for part in memory.exchange(x)]

        own, other = together(members, work)
        for a, b in zip(own, other, strict=True):  # type: ignore[call-overload]
            assert torch.equal(a, b)


def test_numbers_of_exchanges_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "NUMBERS", 4)
    members = join(2)

    def work(memory: SharedMemory) -> list[int]:
        return [int(memory.exchange(torch.tensor([k]))[1 - memory.rank]) for k in range(50)]

    assert together(members, work) == [list(range(50))] * 2


def waiting(memory: SharedMemory) -> Future[BaseException | None]:
    """Exchange a message on a thread."""
    ended: Future[BaseException | None] = Future()

    def work() -> None:
        try:
            memory.exchange(torch.zeros(4))
        except RanksLost as error:
            ended.set_result(error)
        else:
            ended.set_result(None)

    threading.Thread(target=work, daemon=True).start()
    return ended


def test_abort_ends_the_wait_of_its_rank_and_later_ones_of_the_others() -> None:
    first, second = join(2)
    wait = waiting(second)
    second.abort()
    assert "the epoch" in str(wait.result(PATIENCE))
    waiting(first).result(PATIENCE)  # the message may have been sent before
    assert "another rank has left" in str(waiting(first).result(PATIENCE))


def test_a_rank_that_drops_the_group_ends_the_others_waits() -> None:
    members = join(2)
    wait = waiting(members[0])
    del members[1]
    assert "another rank has left" in str(wait.result(PATIENCE))


def test_a_killed_process_is_noticed_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    read, write = os.pipe()
    path = str(tmp_path / "store")
    pid = os.fork()
    if pid == 0:
        try:
            member = SharedMemory.join(FileStore(path, 2), 1, 2)
            member.exchange(torch.ones(2))
            os.write(write, b"1")
            signal.pause()
        finally:
            os._exit(1)
    memory = SharedMemory.join(FileStore(path, 2), 0, 2)
    assert memory.exchange(torch.zeros(2))[1].tolist() == [1.0, 1.0]
    assert os.read(read, 1) == b"1"
    wait = waiting(memory)
    os.kill(pid, signal.SIGKILL)
    assert "the process of another rank has ended" in str(wait.result(PATIENCE))
    os.waitpid(pid, 0)
    for end in (read, write):
        os.close(end)
    new = set(os.listdir("/dev/shm")) - before
    others = ("responses", "runahead-shm")
    assert not [name for name in new if "runahead" in name and not any(map(name.__contains__, others))], (
        "others may serve"
    )


def test_ranks_that_see_another_file_share_nothing() -> None:
    """As in two containers, where the number of a process means another process."""
    store = HashStore()
    store.set("memory", f"{os.getpid()} 0 {'00' * 16}")

    class Foreign:
        """Store in which rank 0's description is that of another file."""

        def set(self, key: str, value: str) -> None:
            if key != "memory":
                store.set(key, value)

        def get(self, key: str) -> bytes:
            return store.get(key)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda rank: SharedMemory.join(Foreign(), rank, 2), range(2))) == [None, None]


@pytest.mark.parametrize("limit", [resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE])
def test_ranks_of_a_system_that_refuses_memory_share_nothing(limit: int) -> None:
    store, files = HashStore(), os.listdir("/proc/self/fd")
    store.set_timeout(timedelta(seconds=PATIENCE))
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (0, hard))  # of files that are opened, or of their sizes
    try:
        with ThreadPoolExecutor(2) as pool:
            joined = list(pool.map(lambda rank: SharedMemory.join(store, rank, 2), range(2)))
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert joined == [None, None]
    assert {*os.listdir("/proc/self/fd")} <= {*files}
