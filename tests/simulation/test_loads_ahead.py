"""Loads of blocks that a request to come will need, before it has come."""

import pytest

from protocol.block_names import names_of
from protocol.codec import pack
from protocol.suspects import SUSPECT_AFTER
from services.scheduler.core.limits import Limits
from services.scheduler.core.loading import DROPPED_SECONDS, BlockLoad, LoadTimes
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.test_suspects import in_flight, lose_workers
from tests.simulation.tier import LoadUnderWay, SimulatedTier
from tests.simulation.world import World, params

SIZE, BLOCKS = 4, 16
PROMPT = [20 + i for i in range(6 * SIZE + 1)]
NAMES = names_of("", pack(PROMPT), SIZE)
LIMITS = Limits(4, 64, 64, BLOCKS, SIZE, loads_blocks=True, fetches_blocks=True)


@pytest.fixture
def world() -> World:
    """Workers whose tier has the first four blocks of the prompt."""
    computing = World(LIMITS, 2, tier=SimulatedTier())
    computing.add(PROMPT, params(2))
    computing.drain()
    world = World(LIMITS, 2, use_priority=True, tier=SimulatedTier())
    world.checker.known.update(computing.checker.known)
    world.tier.kept = {name: [*computing.checker.known[name]] for name in NAMES[:4]}
    return world


def begun(world: World, num_blocks: int) -> LoadUnderWay:
    world.load_ahead(NAMES[:num_blocks])
    world.dispatch()
    [load] = world.tier.loads
    return load


def answer(world: World, load: LoadUnderWay) -> None:
    while not load.is_over:
        world.tier.fill(load, world.names, world.worker.kv, fails=False)
    world.report_load(load)


def test_a_request_finds_what_was_loaded_before_it_came(world: World) -> None:
    answer(world, begun(world, 4))
    assert not world.engine.has_requests
    stream = world.add(PROMPT, params(2))
    world.dispatch()
    [rest] = world.tier.loads
    assert len(rest.blocks) == 2, "it asks for the rest"
    answer(world, rest)
    world.drain()
    assert stream.hit == 4 * SIZE
    counters = world.store.counters
    assert counters["external_prefix_cache_hits"] == 4 * SIZE
    assert counters["external_prefix_cache_queries"] == 6 * SIZE, "a load ahead asks for what it finds"


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_that_comes_meanwhile_waits_and_asks_for_what_is_missing(world: World, is_aborted: bool) -> None:
    load = begun(world, 6)
    stream = world.add(PROMPT, params(2))
    world.dispatch()
    assert len(world.store.loading) == 1, "it waits for the same load"
    if is_aborted:
        world.abort(stream)
        world.dispatch()
    answer(world, load)
    assert len(world.epoch.kv.pool.by_hash) == 4, "the load goes on without it"
    if not is_aborted:
        world.dispatch()
        [rest] = world.tier.loads
        assert len(rest.blocks) == 2
        answer(world, rest)
    world.drain()


def test_a_load_ahead_never_takes_more_than_is_free(world: World) -> None:
    other = world.add([3] * (12 * SIZE), params(4))
    world.dispatch()
    world.load_ahead(NAMES[:6])
    world.dispatch()
    assert [load.is_ahead for load in world.store.loading] == [False]
    world.drain()
    assert other.finish is not None


def test_the_engine_waits_for_a_load_that_holds_its_blocks(world: World) -> None:
    """A request that lacks only these blocks is no stall."""
    load = begun(world, 6)
    world.add([3] * (12 * SIZE), params(4))
    world.dispatch()
    assert not world.engine.queue
    answer(world, load)
    world.drain()


def test_a_drop_ends_loads_ahead(world: World) -> None:
    world.load_ahead(NAMES)
    world.drop_blocks(NAMES[:1])
    world.dispatch()
    assert not world.store.loading.under_way
    world.drain()


def test_a_load_that_began_before_a_reset_brings_nothing(world: World) -> None:
    load = begun(world, 4)
    world.reset_prefix_cache(reset_running=False)
    answer(world, load)
    assert not world.epoch.kv.pool.by_hash
    world.drain()


def test_no_load_brings_a_block_that_another_engine_has_not_dropped_yet(world: World) -> None:
    world.drop_blocks(NAMES[2:3])
    world.drain()
    load = begun(world, 4)
    assert len(load.blocks) == 2
    answer(world, load)
    world.engine.advance(world.store.now + DROPPED_SECONDS)
    assert len(begun(world, 4).blocks) == 2, "the drop is over"


def test_while_a_suspect_runs_alone_nothing_is_loaded(world: World) -> None:
    """It would wait for the load, and be admitted meanwhile."""
    world.conserves_work = False
    suspect = world.add(PROMPT, params(20, eos=False))
    for _ in range(SUSPECT_AFTER):
        while not in_flight(world, suspect):
            world.dispatch()
            for load in world.tier.loads:
                answer(world, load)
        lose_workers(world)
    world.load_ahead(NAMES)
    world.dispatch()
    assert in_flight(world, suspect)
    assert not world.store.loading.under_way
    world.drain()
    assert len(suspect.tokens) == 20


def test_a_running_request_needs_the_blocks_of_a_load(world: World) -> None:
    running = world.add([3], params(50, eos=False))
    world.step()
    load = begun(world, 6)
    for _ in range(60):
        world.step()
    assert len(running.tokens) == 50
    assert world.store.counters["num_preemptions"] == 0
    assert not world.store.loading.under_way
    answer(world, load)
    world.drain()


def test_a_lost_epoch_leaves_no_load_and_its_requests_ask_again(world: World) -> None:
    """Also a load that was not sent, as the connection broke before."""
    world.load_ahead(names_of("", pack([3] * SIZE), SIZE))
    stream = world.add(PROMPT, params(2))
    messages = world.engine.dispatch()
    next(messages)
    messages.close()
    assert len(world.store.loading) == len(world.store.loading.unsent) == 1
    world.end_epoch()
    world.start_epoch(LIMITS, ChunkedPolicy())
    world.dispatch()
    [load] = world.tier.loads
    assert len(load.blocks) == 6
    answer(world, load)
    world.drain()
    assert stream.hit == 4 * SIZE


def test_a_request_displaces_another_when_its_load_has_ended(world: World) -> None:
    others = [world.add([3, i], params(6, eos=False), priority=1) for i in range(LIMITS.max_num_seqs)]
    world.step()
    stream = world.add(PROMPT, params(2))
    world.dispatch()
    assert world.store.counters["num_preemptions"] == 0
    answer(world, world.tier.loads[0])
    world.drain()
    assert (stream.hit, others[-1].finish.num_preemptions) == (4 * SIZE, 1)


def test_a_tier_is_asked_for_less_after_two_late_answers_in_a_row() -> None:
    """One that finds nothing may be late by chance, also the first."""
    times, load = LoadTimes(), BlockLoad([], [], [], (), False, began=0.0, gives_up=2.0)
    for seconds, is_worth in ((0.5, True), (0.01, True), (0.5, True), (0.5, False)):
        times.add(load, 0, seconds)
        assert times.is_worth(1.0, 1, now=1.0) == is_worth
