"""KV memory with the names of its blocks: what the next epoch, or the next process, finds in it."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.block_names import NAME_BYTES, NamedBlocks
from protocol.codec import pack
from protocol.sampling import SamplingParams
from protocol.steps import KeepPins, KeptPin, LoadBlocks, NewRequest, ReleaseSlots, SchedulerOutput
from services.kv_keeper import KeptMemory
from services.worker.kv_memory import PAGE, BlockNames, KVMemory

BLOCK_SIZE, BLOCKS, BLOCK_BYTES = 4, 8, 100


def named(*blocks: int) -> NamedBlocks:
    return NamedBlocks.from_lists(blocks, [bytes([block]) * NAME_BYTES for block in blocks])


def blocks_of(held: NamedBlocks | None) -> list[int]:
    return [] if held is None else [block for block, _ in held.pairs()]


def plan(start: int, table: list[int], grown: list[int], whole: NamedBlocks | None = None) -> SchedulerOutput:
    """A step with a new request in slot 1 that begins at `start`, and a row of slot 0 that gets blocks."""
    new = NewRequest(1, 1, pack([7] * 9), 9, pack(table), SamplingParams(max_tokens=1))
    return SchedulerOutput(
        *(1, 1, pack([0, 1]), pack([1, 1]), pack([8, start]), pack([1, 1]), b"\1\0", [new]),
        *(pack([0] * len(grown)), pack(grown)),
        whole=whole,
    )


def test_a_block_loses_its_name_before_the_step_that_writes_it() -> None:
    names = BlockNames.empty(BLOCKS, BLOCK_SIZE)
    names.follow(ReleaseSlots(1, b"", named(5, 0, 1, 2, 3, 4)))
    assert blocks_of(names.held()) == [5, 0, 1, 2, 3, 4], "in the order in which they became whole"
    names.follow(plan(start=8, table=[0, 1, 2], grown=[3], whole=named(6, 3)))
    assert blocks_of(names.held()) == [5, 0, 1, 4, 6], "a shared prefix keeps its names"
    names.forget_all()
    names.follow(ReleaseSlots(1, b"", named(7)))
    assert blocks_of(names.held()) == [7]


def test_a_block_can_be_read_when_the_step_that_completes_it_was_executed() -> None:
    names = BlockNames.empty(BLOCKS, BLOCK_SIZE)

    def readable() -> list[int]:
        return [block for block in range(BLOCKS) if names.block_of(bytes([block]) * NAME_BYTES) is not None]

    names.follow(replace(plan(start=0, table=[0, 1, 2], grown=[3]), completes=named(0, 1)))
    assert readable() == []
    names.executed = 1
    assert readable() == [0, 1]
    assert names.held() is None, "adoption waits for the confirmation"
    names.follow(ReleaseSlots(1, b"", named(1)))
    names.follow(replace(plan(start=0, table=[0, 4], grown=[]), step_id=2, completes=named(4, 6)))
    assert readable() == [1], "block 0 was given away"
    names.forget([bytes([4]) * NAME_BYTES])
    names.executed = 2
    assert readable() == [1, 6], "block 4 was dropped"
    names.forget_all()
    assert readable() == []


class OneMemory(KeptMemory):
    """Shared memory that outlives a process, whatever the digest is."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("kv")

    def claim(self, digest: bytes) -> int:
        return os.dup(self.descriptor)

    def drop(self) -> None: ...


@pytest.fixture
def kept() -> Iterator[OneMemory]:
    memory = OneMemory()
    yield memory
    os.close(memory.descriptor)


def begun(kept: OneMemory, identity: str = "model", num_blocks: int = BLOCKS) -> KVMemory:
    memory = KVMemory(kept)
    memory.begin(identity, BLOCK_SIZE, num_blocks, BLOCK_BYTES)
    return memory


def test_the_next_process_finds_data_and_names(kept: OneMemory) -> None:
    memory = begun(kept)
    data = np.frombuffer(memory.take(BLOCKS * BLOCK_BYTES), np.uint8)
    data[:] = 9
    memory.names.follow(ReleaseSlots(1, b"", named(3, 1)))
    pins = KeepPins(1, BLOCK_SIZE, [KeptPin("one", "owner", bytes(NAME_BYTES) * 2)])
    memory.pins = pins
    after = KVMemory(kept)
    assert after.find("model", BLOCK_SIZE) == BLOCKS
    assert blocks_of(after.held()) == [3, 1]
    assert after.begin("model", BLOCK_SIZE, BLOCKS - 2, BLOCK_BYTES) == BLOCKS, "more than the group uses"
    assert bytes(after.take(BLOCKS * BLOCK_BYTES)) == data.tobytes()
    assert after.pins == pins
    after.names.follow(ReleaseSlots(1, b"", named(0)))
    assert blocks_of(after.held()) == [3, 1, 0], "numbers go on"


@pytest.mark.parametrize("drops_all", [False, True])
def test_the_next_process_reports_the_last_drop(kept: OneMemory, drops_all: bool) -> None:
    memory = begun(kept)
    memory.names.follow(ReleaseSlots(1, b"", named(3, 1)))
    dropped = b"" if drops_all else bytes([3]) * NAME_BYTES
    memory.forget(LoadBlocks(7, 1, 1, b"", b"", dropped=dropped, drops_all=drops_all))
    after = KVMemory(kept)
    assert after.find("model", BLOCK_SIZE) == BLOCKS
    assert (after.dropped_in, blocks_of(after.held())) == (7, [] if drops_all else [1])
    assert begun(kept, "another model").dropped_in == 0


@pytest.mark.parametrize("identity", ["model", "another model"])
def test_a_cache_of_another_kind_or_size_is_dropped(kept: OneMemory, identity: str) -> None:
    memory = begun(kept)
    memory.names.follow(ReleaseSlots(1, b"", named(3)))
    more = begun(kept, identity, BLOCKS + 1)
    assert more.held() is None
    assert not any(more.take((BLOCKS + 1) * BLOCK_BYTES))


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 4096])
def test_memory_that_was_cut_is_not_used(kept: OneMemory, size: int) -> None:
    """A process that is killed while it allocates leaves any size."""
    begun(kept)
    os.ftruncate(kept.descriptor, size)
    memory = KVMemory(kept)
    assert memory.find("model", BLOCK_SIZE) == 0
    assert memory.held() is None


def test_memory_that_a_thread_may_still_write_is_given_up(kept: OneMemory) -> None:
    memory = begun(kept)
    memory.abandon()
    assert KVMemory(kept).find("model", BLOCK_SIZE) == 0
    assert memory.begin("model", BLOCK_SIZE, BLOCKS, BLOCK_BYTES) == BLOCKS
    assert KVMemory(kept).find("model", BLOCK_SIZE) == 0, "its memory is its own from now on"


class EndingRank(KVMemory):
    def end_at_pins(self) -> None:
        """End when pins are written."""
        assert self._pin_rooms is not None
        self._pin_rooms.flags.writeable = False


def pinned(*names: str) -> KeepPins:
    return KeepPins(1, BLOCK_SIZE, [KeptPin(name, "owner", os.urandom(NAME_BYTES)) for name in names])


def test_pins_that_were_written_in_part_leave_those_of_before(kept: OneMemory) -> None:
    """The process is killed at any byte of the third write, and at any byte of the one that its successor makes."""

    def content() -> bytes:
        return os.pread(kept.descriptor, os.fstat(kept.descriptor).st_size, 0)

    def found() -> KeepPins | None:
        memory = KVMemory(kept)
        memory.find("model", BLOCK_SIZE)
        return memory.pins

    def torn(before: bytes, after: bytes) -> Iterator[bool]:
        """Leave each part of a write, in either direction, the header last. Yield whether it was the whole one."""
        changed = [at for at in range(PAGE, len(before)) if before[at] != after[at]]
        for order in (changed, changed[::-1]):
            os.pwrite(kept.descriptor, before, 0)
            for at in order:
                yield False
                os.pwrite(kept.descriptor, after[at : at + 1], at)
            yield False
            os.pwrite(kept.descriptor, after[:PAGE], 0)
            assert content() == after
            yield True

    memory = begun(kept)
    sets = [pinned("one"), pinned("one", "two"), pinned(), pinned("three", "four")]
    for pins in sets[:2]:
        memory.pins = pins
    before = content()
    memory.pins = sets[2]
    for is_whole in torn(before, content()):
        state = content()
        assert found() == sets[2 if is_whole else 1]
        successor = KVMemory(kept)
        successor.find("model", BLOCK_SIZE)
        successor.pins = sets[3]
        assert found() == sets[3], "it writes to the room of the torn ones"
        os.pwrite(kept.descriptor, state, 0)
    os.pwrite(kept.descriptor, before, 0)
    begun(kept).pins = sets[3]
    assert sum(found() == sets[3] for _ in torn(before, content())) == 2
    ending = EndingRank(kept)
    ending.find("model", BLOCK_SIZE)
    ending.end_at_pins()
    with pytest.raises(ValueError, match="read-only"):
        ending.pins = sets[0]
    assert found() == sets[3], "the header changes after the pins"


def test_pins_without_room_do_not_outlive_the_process(kept: OneMemory) -> None:
    memory = begun(kept)
    memory.pins = pinned("one")
    memory.pins = many = KeepPins(1, BLOCK_SIZE, [KeptPin("x" * 200, "y" * 200, b"")] * 1024)
    assert memory.pins == many
    after = KVMemory(kept)
    after.find("model", BLOCK_SIZE)
    assert after.pins is None
