"""Workers are lost and replaced in named situations; pipeline stages. Random runs cover the rest."""

from dataclasses import replace

import pytest

from protocol.media import Media, MediaItem
from protocol.requests import FinishReason
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import RequestStatus
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.test_acceptance import DEPTHS, ROOMY, entered
from tests.simulation.world import World, params, prompt_of


def change_workers(world: World, limits: Limits | None = None, keeps: bool = False) -> None:
    """`keeps`: the workers live and keep their memory."""
    world.end_epoch()
    keeps_memory = (lambda _: True) if keeps else None
    world.start_epoch(limits or world.limits, ChunkedPolicy(), keeps_memory=keeps_memory)


@pytest.mark.parametrize("depth", DEPTHS)
def test_running_requests_go_on_with_their_confirmed_tokens(depth: int) -> None:
    world = World(ROOMY, depth)
    streams = [world.add(prompt_of(30, seed=i), params(20, eos=False)) for i in range(4)]
    for _ in range(6):
        world.step()
    world.dispatch()
    confirmed = [len(stream.tokens) for stream in streams]
    assert confirmed == [6] * 4
    change_workers(world)
    for stream in streams:
        assert stream.request.status is RequestStatus.PREEMPTED
    world.dispatch()
    first = world.plans[-len(world.engine.queue)]
    assert (first.epoch, first.step_id) == (2, 1), "step ids begin anew with the epoch"
    assert [len(new.token_ids) // 4 for new in first.new] == [36] * 4, "recomputed from every confirmed token"
    world.drain()
    while world.orphans:
        world.late_result()
    assert world.coverage["late results: epoch ended"] == depth


@pytest.mark.parametrize("depth", DEPTHS)
def test_only_steps_in_flight_are_recomputed_by_workers_that_live(depth: int) -> None:
    world = World(ROOMY, depth)
    stream = world.add(prompt_of(170), params(60, eos=False))
    for _ in range(40):
        world.step()
    world.dispatch()
    change_workers(world, keeps=True)
    world.drain()
    _, hit, count = entered(world, 1)
    known = 170 + 40
    assert hit == (known - 1) // 16 * 16, "every whole block of confirmed tokens is adopted"
    assert count == known - hit
    assert stream.scheduled == (170 + 59) + depth + (known - 1) % 16, "steps in flight, and a block that was not whole"


@pytest.mark.parametrize("depth", DEPTHS)
def test_blocks_of_a_prompt_in_flight_are_not_adopted(depth: int) -> None:
    """They are in the prefix cache already: eager registration."""
    world = World(ROOMY, depth)
    world.add(prompt_of(160), params(9, eos=False))
    world.dispatch()
    assert len(world.epoch.kv.pool.by_hash) >= 8
    change_workers(world, keeps=True)
    assert not world.epoch.kv.pool.by_hash
    world.drain()


def test_blocks_whose_writer_left_in_flight_are_adopted_when_their_reader_is_confirmed() -> None:
    world = World(ROOMY, 2)
    writer = world.add(prompt_of(160), params(9))
    world.dispatch()
    world.abort(writer)
    reader = world.add(prompt_of(160), params(1))
    world.drain()
    change_workers(world, keeps=True)
    assert len(world.epoch.kv.pool.by_hash) == reader.hit // 16 == 9


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_cache_that_was_reset_is_not_adopted(depth: int) -> None:
    world = World(ROOMY, depth)
    world.add(prompt_of(160), params(3, eos=False))
    world.drain()
    world.reset_prefix_cache(reset_running=False)
    world.dispatch()
    change_workers(world, keeps=True)
    assert not world.epoch.kv.pool.by_hash


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_blocks", [8, 64])
def test_a_group_with_less_memory_ends_what_does_not_fit_and_only_that(num_blocks: int, depth: int) -> None:
    world = World(Limits(4, 64, 128, 32, 4, encoder_budget=64), depth)
    small = world.add(prompt_of(10), params(12, eos=False))
    image = world.add(prompt_of(10), params(12, eos=False), media=Media([MediaItem(1, 9, "a")]))
    large = world.add(prompt_of(60, seed=1), params(20, eos=False))
    waits = world.add(prompt_of(70, seed=2), params(2, eos=False))
    for _ in range(3):
        world.step()
    world.dispatch()
    before = len(large.tokens)
    change_workers(world, replace(world.limits, num_blocks=num_blocks, encoder_budget=num_blocks))
    late = world.add(prompt_of(10), params(12, eos=False), media=Media([MediaItem(1, 9, "a")]))
    world.drain()
    assert len(small.tokens) == 12
    if num_blocks == 64:
        assert (len(image.tokens), len(large.tokens), len(waits.tokens)) == (12, 20, 2)
        return
    for stream in (image, large, waits):
        assert stream.finish.reason is FinishReason.ERROR
        assert "less memory" in stream.finish.message
    assert len(large.tokens) == before
    assert "at most 8" in late.finish.message


def test_a_request_that_finished_in_the_turn_of_the_loss_keeps_its_finish() -> None:
    world = World(ROOMY, 2)
    done = world.add(prompt_of(5), params(1, eos=False))
    world.dispatch()
    world.complete()
    world.end_epoch()
    world.frontends.receive()
    assert done.finish.reason is FinishReason.LENGTH
    world.start_epoch(world.limits, ChunkedPolicy())
    world.drain()


def test_totals_outlive_the_workers() -> None:
    """Prometheus counters never decrease."""
    world = World(ROOMY, 2)
    world.add(prompt_of(64), params(5, eos=False))
    world.drain()
    world.add(prompt_of(64), params(5, eos=False))
    for _ in range(3):
        world.step()
    before = world.engine.stats()
    change_workers(world)
    after = world.engine.stats()
    totals = [name for name, value in before.items() if value and name.split("_")[0] not in ("kv", "num", "inflight")]
    assert "prefix_cache_hits" in totals
    assert {name: after[name] for name in totals} == {name: before[name] for name in totals}
    world.drain()


# -- pipeline stages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "depth"), [(1, 1), (1, 2), (2, 2), (2, 3), (2, 4), (4, 4), (4, 5), (4, 8)])
def test_one_request_enters_again_when_its_token_is_at_the_first_stage(stages: int, depth: int) -> None:
    world = World(replace(ROOMY, stages=stages), depth)
    world.add(prompt_of(10), params(30, eos=False))
    world.dispatch()
    assert len(world.plans) == (1 if stages > 1 else depth), "a second step would need an id that was not sampled yet"
    while not world.streams[0].finish:
        world.step()
    assert world.streams[0].steps == 30
