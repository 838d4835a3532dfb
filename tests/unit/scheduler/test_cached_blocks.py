"""Reports of the prefix cache: each frontend that follows it knows its names, a pass later, whatever happened."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from protocol.block_names import NAME_BYTES, split_names
from protocol.kv_groups import name_in_group
from protocol.records import CachedBlocks
from services.scheduler import cached_blocks
from services.scheduler.cached_blocks import PASS_SECONDS, CachedBlockReports
from services.scheduler.core.block_pool import BlockPool

BLOCKS = 40


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes several turns, and all names several messages."""
    monkeypatch.setattr(cached_blocks, "PART", 16)


def name(index: int) -> bytes:
    return index.to_bytes(NAME_BYTES, "big")


@dataclass
class Follower:
    """A frontend that applies what it gets, and notices what it misses."""

    names: set[bytes] = field(default_factory=set)
    next: int = 0
    num_messages: int = 0

    def apply(self, message: CachedBlocks) -> None:
        if message.number == 0:
            self.names.clear()
        else:
            assert message.number == self.next
        self.next = message.number + 1
        self.names -= set(split_names(message.removed))
        self.names |= set(split_names(message.stored))
        self.num_messages += 1


@dataclass
class Cache:
    """The part of a `KVCacheManager` that reports read."""

    pool: BlockPool
    num_groups: int = 1
    emitted_group: int = 0
    emitted: bytearray = field(default_factory=lambda: bytearray(BLOCKS))


class Reporting:
    """Reports of one pool, on a clock of its own."""

    def __init__(self) -> None:
        self.pool, self.reports = BlockPool(BLOCKS), CachedBlockReports()
        self.followers: dict[int, Follower] = {}
        self.now = 0.0
        self.num_messages = 0

    def follow(self, *frontends: int) -> None:
        for frontend in frontends:
            self.followers[frontend] = Follower()
            self.reports.set(frontend, True)

    def turn(self) -> None:
        self.now += PASS_SECONDS / 2
        for frontend, message in self.reports.take(self.now, Cache(self.pool)):  # type: ignore[arg-type]
            self.followers[frontend].apply(message)
            self.num_messages += 1

    def settle(self) -> None:
        for _ in range(8):
            self.turn()
        assert all(follower.names == set(self.pool.by_hash) for follower in self.followers.values())

    def store(self, names: Iterable[int]) -> list[int]:
        blocks = self.pool.take(len(indices := list(names)))
        for block, index in zip(blocks, indices, strict=True):
            self.pool.register(block, name(index))
        return blocks


def test_any_changes_are_known_a_pass_later() -> None:
    rng, world, held = random.Random(1), Reporting(), list[list[int]]()
    world.follow(0)
    for turn in range(2000):
        match rng.randrange(12):
            case 0 | 1 | 2 | 3 if world.pool.num_free >= 5:
                held.append(world.store(rng.sample(range(60), 5)))
            case 4 | 5 | 6 if held:
                world.pool.give_back(held.pop(rng.randrange(len(held))))
            case 7 if rng.random() < 0.05:
                world.pool.forget_all()
            case 8 if rng.random() < 0.05:  # another epoch
                world.pool, held = BlockPool(rng.choice((BLOCKS, BLOCKS + 7))), []
            case 9:
                frontend = rng.randrange(3)
                world.reports.set(frontend, False)
                world.follow(frontend)
            case _:
                world.turn()
        if not turn % 50:
            world.settle()
    assert world.num_messages > 500


def nothing_is_gone(self: CachedBlockReports, name: bytes | None, pool: BlockPool) -> bytes | None:
    return None


def other_blocks_are_not_followed(self: CachedBlockReports, name: bytes | None, pool: BlockPool) -> bytes | None:
    return None if name in pool.by_hash else name


@pytest.mark.parametrize("mutant", [nothing_is_gone, other_blocks_are_not_followed])
def test_a_fault_of_the_comparison_is_noticed(mutant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedBlockReports, "_gone", mutant)
    with pytest.raises(AssertionError):
        test_any_changes_are_known_a_pass_later()


@pytest.mark.parametrize("turns", range(8))
def test_a_name_that_moved_to_another_block_is_removed_when_that_block_loses_it(turns: int) -> None:
    """Whichever of the two blocks has been compared in between."""
    world = Reporting()
    world.follow(0)
    world.pool.blank = list(range(BLOCKS))  # the last block is taken first
    (last,) = world.store([1])
    world.settle()
    world.pool.forget(last)
    world.pool.register(0, name(1))
    for _ in range(turns):
        world.turn()
    world.pool.forget(0)
    world.settle()


def test_an_idle_cache_sends_nothing() -> None:
    world = Reporting()
    world.follow(0, 1)
    world.store(range(10))
    world.settle()
    before = [follower.num_messages for follower in world.followers.values()]
    world.settle()
    assert [follower.num_messages for follower in world.followers.values()] == before


def test_a_later_follower_gets_everything_and_others_get_nothing_again() -> None:
    world = Reporting()
    world.follow(0)
    world.store(range(BLOCKS))
    world.settle()
    before = world.followers[0].num_messages
    world.follow(1)
    world.settle()
    assert (world.followers[0].num_messages, world.followers[1].num_messages) == (before, 3)


def test_nothing_is_read_while_nobody_follows() -> None:
    world = Reporting()
    world.follow(0)
    world.settle()
    world.reports.set(0, False)
    world.pool = None  # type: ignore[assignment]
    world.turn()


def test_of_several_groups_one_is_reported_with_the_names_of_its_tokens() -> None:
    pool, reports, follower = BlockPool(BLOCKS), CachedBlockReports(), Follower()
    cache = Cache(pool, num_groups=2, emitted_group=1)
    for group in (0, 1):
        for block in pool.take(10):
            pool.register(block, name_in_group(name(block % 10), group))
            cache.emitted[block] = group
    reports.set(0, True)
    for turn in range(8):
        for _, message in reports.take(turn * PASS_SECONDS, cache):  # type: ignore[arg-type]
            follower.apply(message)
    assert follower.names == {name(index) for index in range(10)}
