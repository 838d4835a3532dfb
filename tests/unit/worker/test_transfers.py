"""Blocks on their way between KV memory and tiers, on the threads that production uses."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from queue import Queue

import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.block_names import NAME_BYTES, NamedBlocks
from protocol.codec import pack
from protocol.kv_groups import ONE_GROUP, KVGroup
from protocol.membership import Loaded
from protocol.steps import BlocksLoaded, LoadBlocks, ReleaseSlots
from services.config import WorkerConfig
from services.kv_keeper import KeptMemory
from services.worker.kv_memory import KVMemory
from services.worker.runner import LoadError
from services.worker.tiers.disk import DiskTier
from services.worker.tiers.host import HostTier
from services.worker.tiers.offload import Offload
from services.worker.tiers.transfers import BlockTransfers
from tests.unit.test_kv_keeper import found, keeper, left
from tests.waiting import PATIENCE, wait_until

BLOCKS, BLOCK_SIZE, LAYERS, SIZE = 8, 4, 3, 10


class WatchedTier(HostTier):
    """A tier whose calls run a hook first, on the thread of the transfer."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.before: Callable[[bytes], None] = lambda name: None
        self.before_put: Callable[[], None] = lambda: None
        self.asked = threading.Event()

    def has(self, name: bytes) -> bool:
        self.asked.set()
        return super().has(name)

    def put(self, name: bytes, data: memoryview) -> None:
        self.before_put()
        super().put(name, data)

    def get(self, name: bytes, into: memoryview) -> bool:
        self.before(name)
        return super().get(name, into)


def name(number: int) -> bytes:
    return bytes([number]) * NAME_BYTES


class Rank:
    """KV memory of two parts: one with layers, and one without."""

    def __init__(self) -> None:
        self.memory, self.tier = KVMemory(), WatchedTier()
        self.memory.begin("model", BLOCK_SIZE, BLOCKS, LAYERS * SIZE + SIZE)
        self.layers: NDArray[np.uint8] = np.frombuffer(self.memory.take(LAYERS * BLOCKS * SIZE, LAYERS), np.uint8)
        self.rest: NDArray[np.uint8] = np.frombuffer(self.memory.take(BLOCKS * SIZE), np.uint8)
        self.layers[:] = np.arange(len(self.layers))
        self.rest[:] = np.arange(len(self.rest)) + 100
        self.answers: Queue[BlocksLoaded] = Queue()
        self.transfers = BlockTransfers(self.memory, [self.tier], self.answers.put)

    def follow(self, *blocks: int) -> None:
        """These blocks became whole; each has its number as name."""
        self.transfers.follow(self.whole(*blocks))

    def whole(self, *blocks: int) -> NamedBlocks:
        """Name these blocks in memory."""
        whole = NamedBlocks.from_lists(blocks, [name(block) for block in blocks])
        self.memory.names.follow(ReleaseSlots(1, b"", whole))
        return whole

    def load(self, ticket: int, pairs: dict[int, int]) -> None:
        """`pairs`: block -> number of its name"""
        names = b"".join(map(name, pairs.values()))
        self.transfers.load(LoadBlocks(1, 1, ticket, pack([*pairs]), names))

    def answer(self) -> BlocksLoaded:
        return self.answers.get(timeout=PATIENCE)

    def content(self, block: int) -> bytes:
        layers = self.layers.reshape(LAYERS, BLOCKS, SIZE)[:, block].tobytes()
        return layers + self.rest.reshape(BLOCKS, SIZE)[block].tobytes()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.transfers.end(patience=PATIENCE)


def test_blocks_are_written_and_loaded_to_other_places(rank: Rank) -> None:
    before = [rank.content(block) for block in range(BLOCKS)]
    rank.follow(2, 5)
    rank.transfers.end(patience=PATIENCE)
    assert not rank.tier.has(name(3))
    rank.transfers = BlockTransfers(rank.memory, [rank.tier], rank.answers.put)
    rank.load(1, {0: 5, 7: 2, 1: 3, 4: 5})
    assert rank.answer() == BlocksLoaded(1, 1, 2, {"host": 2}), "up to the first one that is missing"
    assert [rank.content(block) for block in (0, 7)] == [before[5], before[2]]
    untouched = [1, 2, 3, 4, 5, 6]
    assert [rank.content(block) for block in untouched] == [before[block] for block in untouched]


def test_a_block_that_changes_while_it_is_copied_is_not_written(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank.memory.names is not None
    names, read = rank.memory.names, rank.memory.read_block

    def changes(block: int, into: memoryview) -> None:
        if block == 1:
            names.drop([1])  # as for a plan that gives it away; another one names it again
            names.follow(ReleaseSlots(1, b"", NamedBlocks.from_lists([1], [name(1)])))
        read(block, into)

    monkeypatch.setattr(rank.memory, "read_block", changes)
    rank.follow(1, 2)
    rank.transfers.end(patience=PATIENCE)
    assert not rank.tier.has(name(1))
    assert rank.tier.has(name(2))


def test_a_block_without_its_name_is_not_written(rank: Rank) -> None:
    whole = NamedBlocks.from_lists([1], [name(1)])
    rank.transfers.follow(whole)
    rank.follow(2)
    rank.transfers.end(patience=PATIENCE)
    assert not rank.tier.has(name(1))
    assert rank.tier.has(name(2))


def test_a_block_that_was_given_away_is_not_filled(rank: Rank) -> None:
    for number in range(BLOCKS):
        rank.tier.put(name(number), memoryview(bytes([number]) * (LAYERS * SIZE + SIZE)))
    assert rank.memory.names is not None
    names = rank.memory.names

    def gives_away(wanted: bytes) -> None:
        if wanted == name(6):
            names.drop([2])

    rank.tier.before, before = gives_away, rank.content(2)
    rank.load(1, {1: 5, 2: 6, 3: 7})
    assert rank.answer().count == 1
    assert rank.content(2) == before
    rank.tier.before = lambda wanted: rank.load(3, {1: 7}) if wanted == name(5) else None
    rank.load(2, {1: 5})
    assert rank.answer() == BlocksLoaded(1, 2, 0), "another load has taken its block"
    assert rank.answer() == BlocksLoaded(1, 3, 1, {"host": 1})


def test_a_block_that_is_filled_has_no_name(rank: Rank) -> None:
    rank.follow(1, 2)
    rank.load(1, {1: 2})
    assert rank.answer().count in (0, 1)
    held = rank.memory.names.held()
    assert [block for block, _ in held.pairs()] == [2]


def test_nothing_is_touched_after_the_end(rank: Rank) -> None:
    rank.tier.put(name(5), memoryview(bytes(LAYERS * SIZE + SIZE)))
    before, gate = rank.content(1), threading.Barrier(2, timeout=PATIENCE)
    rank.whole(3)
    assert rank.transfers.find([name(3)])[0] == 1
    rank.tier.before = lambda name: (gate.wait(), gate.wait())
    rank.load(1, {1: 5})
    gate.wait()
    rank.transfers.end()
    gate.wait()
    assert rank.answer().count == 0
    assert rank.content(1) == before
    rank.tier.before = lambda name: None
    assert rank.transfers.find([name(3)])[0] == 0


def drop(ticket: int, *numbers: int) -> LoadBlocks:
    return LoadBlocks(1, 1, ticket, b"", b"", dropped=b"".join(map(name, numbers)))


def test_a_dropped_block_is_neither_read_nor_written_again(rank: Rank) -> None:
    """Not even while the thread that removes it is busy, and after the end of the epoch."""
    rank.follow(1, 2)
    wait_until(lambda: rank.tier.has(name(2)), "the block is stored")
    gate = threading.Barrier(2, timeout=PATIENCE)
    rank.tier.before_put = lambda: (gate.wait(), gate.wait())
    rank.follow(3)
    gate.wait()
    rank.memory.names.forget([name(2), name(3)])
    rank.transfers.drop(drop(1, 2, 3))
    rank.load(2, {5: 1, 6: 2})
    assert rank.answer() == BlocksLoaded(1, 2, 1, {"host": 1})
    assert rank.transfers.find([name(2)])[0] == 0, "no peer gets it"
    rank.transfers.end()
    gate.wait()
    assert rank.answer() == BlocksLoaded(1, 1, 0)
    assert [rank.tier.has(name(number)) for number in (1, 2, 3)] == [True, False, False]


def test_tiers_are_those_of_the_weights(rank: Rank) -> None:
    """Another epoch with the same weights finds what is in the memory of the host."""
    made: list[str] = []
    offload = Offload(
        WorkerConfig(kv_offload_bytes=1), rank.answers.put, lambda _, identity: made.append(identity) or []
    )
    rank.memory.content = "model"
    for digest in ("1", "1", "2"):
        offload.open(rank.memory, Loaded("", 0, 0, SIZE, BLOCKS, contents={"norm": digest}), rank=0)
    assert len(made) == len({*made}) == 2
    offload = Offload(WorkerConfig(kv_offload_bytes=1), rank.answers.put, lambda *_: [rank.tier])
    offload.open(rank.memory, Loaded("", 0, 0, SIZE, BLOCKS), rank=0)
    rank.tier.put(name(1), memoryview(b"1"))
    offload.forget()
    assert not rank.tier.has(name(1)), "it may have been dropped from those of others"


@pytest.mark.parametrize(
    ("config", "content", "groups", "reason"),
    [
        ({"kv_offload_bytes": 1}, "", ONE_GROUP, "the KV blocks of a GPU stay there so far"),
        ({"kv_keeper": "/keeper"}, "", ONE_GROUP, "the KV blocks of a GPU stay there so far"),
        ({"kv_offload_bytes": 1}, "model", (KVGroup(), KVGroup()), "groups of KV cache with windows are not offloaded"),
        ({"kv_offload_bytes": 1}, "model", (KVGroup("sliding_window", 8),), "groups of KV cache with windows"),
        ({"kv_keeper": "/keeper"}, "model", (KVGroup(), KVGroup()), None),
        ({}, "", ONE_GROUP, None),
    ],
)
def test_models_whose_blocks_cannot_leave_are_refused(
    rank: Rank, config: dict[str, object], content: str, groups: tuple[KVGroup, ...], reason: str | None
) -> None:
    offload = Offload(WorkerConfig.model_validate(config), rank.answers.put)
    rank.memory.content = content
    with nullcontext() if reason is None else pytest.raises(LoadError, match=reason):
        offload.open(rank.memory, Loaded("", 0, 0, SIZE, BLOCKS, groups=groups), rank=0)


def test_a_reset_leaves_the_tiers_alone(rank: Rank) -> None:
    """So it does not wait for blocks that are being written."""
    offload = Offload(WorkerConfig(kv_offload_bytes=1), rank.answers.put, lambda *_: [rank.tier])
    rank.memory.content = "model"
    offload.open(rank.memory, Loaded("", 0, 0, SIZE, BLOCKS), rank=0)
    offload.begin(rank.memory)
    gate = threading.Barrier(2, timeout=PATIENCE)
    rank.tier.before_put = lambda: (gate.wait(), gate.wait())
    offload.follow(rank.whole(1))
    gate.wait()
    offload.drop(LoadBlocks(1, 1, 1, b"", b"", drops_all=True), None)
    assert rank.answer() == BlocksLoaded(1, 1, 0)
    gate.wait()
    wait_until(lambda: rank.tier.has(name(1)), "the block is stored")
    offload.drop(drop(2, 1), None)
    assert rank.answer() == BlocksLoaded(1, 2, 0)
    assert not rank.tier.has(name(1))
    offload.end(leaves=True)


def test_a_drop_that_the_keeper_does_not_confirm_is_not_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers, keeper = list[BlocksLoaded](), KeptMemory(os.fspath(tmp_path / "kv"))
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(os.fspath(tmp_path / "kv"))
        stopped.listen(0)
        with keeper.connected():  # no other finds room
            offload = Offload(WorkerConfig(), answers.append)
            offload.drop(LoadBlocks(1, 1, 1, b"", b"", drops_all=True), keeper)
            wait_until(lambda: "keeper's answer" not in [t.name for t in threading.enumerate()], "the keeper is asked")
    assert not answers
    assert "the keeper does not answer" in caplog.text


def test_a_drop_that_fails_is_not_confirmed_and_its_blocks_are_not_read(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.follow(1)
    wait_until(lambda: rank.tier.has(name(1)), "the block is stored")

    def fails(_: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rank.tier, "drop", fails)
    rank.transfers.drop(drop(1, 1))
    assert rank.answer() == BlocksLoaded(1, 1, 0, num_failed=1)
    monkeypatch.undo()
    rank.load(2, {5: 1})
    assert rank.answer() == BlocksLoaded(1, 2, 0)
    rank.transfers.drop(drop(3, 1))
    assert rank.answer() == BlocksLoaded(1, 3, 0)
    assert not rank.tier.has(name(1))


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_drop_does_what_it_can_and_reports_what_it_could_not(rank: Rank, tmp_path: Path, is_spare: bool) -> None:
    """A file cannot be removed: the other ones are, and what the keeper holds is freed."""
    tier = DiskTier(os.fspath(tmp_path / "blocks"), "model", 1 << 20)
    offload = Offload(WorkerConfig(kv_offload_bytes=1), rank.answers.put, lambda *_: [tier])
    rank.memory.content = "model"
    offload.open(rank.memory, Loaded("", 0, 0, SIZE, BLOCKS), rank=0)
    if not is_spare:
        offload.begin(rank.memory)
    for number in (1, 2, 3):
        tier.put(name(number), memoryview(bytes(SIZE)))
    [stays] = (tmp_path / "blocks").glob(f"*/{name(1).hex()[:2]}/*")
    stays.unlink()
    stays.mkdir()
    with keeper(tmp_path / "kv"):
        left(tmp_path / "kv", b"blocks")
        offload.drop(drop(1, 1, 2, 3), KeptMemory(os.fspath(tmp_path / "kv")))
        assert rank.answer() == BlocksLoaded(1, 1, 0, num_failed=1)
        assert found(tmp_path / "kv") == b""
    assert [tier.has(name(number)) for number in (1, 2, 3)] == [True, False, False]
    stays.rmdir()
    tier.put(name(1), memoryview(bytes(LAYERS * SIZE + SIZE)))
    if is_spare:
        offload.begin(rank.memory)
    offload.load(LoadBlocks(1, 1, 2, pack([5]), name(1)))
    assert rank.answer() == BlocksLoaded(1, 2, 0), "nobody reads what could not be removed"
    offload.drop(drop(3, 1, 2, 3), None)
    assert rank.answer() == BlocksLoaded(1, 3, 0)
    assert not tier.has(name(1))
    offload.end(leaves=True)


def test_the_memory_tier_keeps_what_was_used_last() -> None:
    tier, buffer = HostTier(3 * SIZE), memoryview(bytearray(SIZE))
    for number in range(3):
        tier.put(name(number), memoryview(bytes([number]) * SIZE))
    assert tier.get(name(0), buffer)
    assert bytes(buffer) == bytes(SIZE)
    tier.put(name(3), memoryview(bytes(SIZE)))
    assert [tier.has(name(number)) for number in range(4)] == [True, False, True, True]
    tier.put(name(3), memoryview(bytes(SIZE)))
    assert [tier.has(name(number)) for number in range(4)] == [True, False, True, True], "a block counts once"
    assert tier.num_bytes == 3 * SIZE
    tier.drop(name(0))
    assert tier.num_bytes == 2 * SIZE
    assert tier.changes.take() == (b"".join(map(name, (0, 1, 2, 3, 3))), name(1) + name(0))
    tier.put(name(4), memoryview(bytes(4 * SIZE)))
    assert not tier.has(name(4)), "it is larger than the tier"
