"""A request that takes its workers down is found and refused; the others finish as without it."""

import pytest

from protocol.requests import FinishReason
from protocol.suspects import PROGRESS, SUSPECT_AFTER
from services.scheduler.core.suspects import GUILTY
from services.scheduler.policies import BatchingPolicy, ChunkedPolicy, PhasedPolicy
from tests.simulation.answer_checks import SimulatedStream
from tests.simulation.test_acceptance import DEPTHS, ROOMY
from tests.simulation.world import World, params, prompt_of


def lose_workers(world: World, policy: BatchingPolicy | None = None) -> None:
    world.end_epoch(is_fault=True)
    world.frontends.receive()
    world.start_epoch(world.limits, policy or ChunkedPolicy())


def in_flight(world: World, stream: SimulatedStream) -> bool:
    request = stream.request
    named = {slot for step in world.engine.queue.steps for slot in step.slots.tolist()}
    return not request.finished and request.slot in named


def run(world: World, poison: SimulatedStream, tokens: int) -> int:
    """Run until nothing is left. The workers die of `poison` in each step after it has a number of output tokens.

    Return the number of deaths.
    """
    deaths = 0
    for _ in range(5000):
        world.dispatch()
        if poison.finish is None and len(poison.tokens) >= tokens and in_flight(world, poison):
            deaths += 1
            poison.doomed = deaths > SUSPECT_AFTER
            lose_workers(world)
            continue
        if not world.pending:
            break
        world.complete()
    world.drain()
    return deaths


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("tokens", [0, 5])
def test_the_guilty_request_is_refused_and_the_others_finish(depth: int, tokens: int) -> None:
    world = World(ROOMY, depth)
    world.conserves_work = False  # suspects run alone
    streams = [world.add(prompt_of(30, seed=i), params(40, eos=False)) for i in range(6)]
    poison = streams[3]
    assert run(world, poison, tokens) == SUSPECT_AFTER + 1
    assert (poison.finish.reason, poison.finish.message) == (FinishReason.ERROR, GUILTY)
    assert all(s.finish is not None and s.finish.reason is FinishReason.LENGTH for s in streams if s is not poison)
    assert not world.store.suspects.active


@pytest.mark.parametrize("depth", DEPTHS)
def test_suspects_run_alone_until_they_make_progress(depth: int) -> None:
    world = World(ROOMY, depth)
    world.conserves_work = False
    streams = [world.add(prompt_of(30, seed=i), params(60, eos=False)) for i in range(3)]
    for _ in range(SUSPECT_AFTER):
        world.dispatch()
        lose_workers(world)
    active = world.store.suspects.active
    for number in range(len(streams)):
        while (0, number) in active:
            world.dispatch()
            assert len(world.epoch.running) <= 1 or not active
            world.complete()
        assert len(streams[number].tokens) >= PROGRESS
    world.drain()


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_policy_sees_no_request_that_waits_for_a_suspect(depth: int) -> None:
    """`phased` would leave steps empty for a new request, which may not enter."""
    policy = PhasedPolicy(ROOMY)
    world = World(ROOMY, depth, policy=policy, conserves_work=False)
    suspect, other = (world.add(prompt_of(30, seed=i), params(60, eos=False)) for i in range(2))
    for _ in range(SUSPECT_AFTER):
        world.dispatch()
        lose_workers(world, policy)
    while world.store.suspects.active:
        world.step()
        assert not other.tokens or len(suspect.tokens) >= PROGRESS
    world.drain()


@pytest.mark.parametrize("depth", DEPTHS)
def test_workers_that_die_of_another_cause_accuse_nobody(depth: int) -> None:
    """Each time the requests have made progress since the last death."""
    world = World(ROOMY, depth)
    stream = world.add(prompt_of(30), params(200, eos=False))
    for _ in range(2 * SUSPECT_AFTER):
        for _ in range(PROGRESS + depth + 1):
            world.step()
        world.dispatch()
        lose_workers(world)
        assert not world.store.suspects.active
    world.drain()
    assert stream.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_suspect_begins_when_the_steps_of_the_one_before_have_ended(depth: int) -> None:
    """The first one is cleared, or ends, while its last steps are in flight: the second is not guilty of their loss."""
    world = World(ROOMY, depth)
    world.conserves_work = False
    streams = [world.add(prompt_of(30, seed=i), params(n, eos=False)) for i, n in enumerate((60, 5, 60))]
    for _ in range(SUSPECT_AFTER):
        world.dispatch()
        lose_workers(world)
    while world.store.suspects.active:
        world.dispatch()
        steps = world.engine.queue.steps
        assert len({slot for step in steps for slot in step.slots.tolist()}) == 1 or not world.store.suspects.active
        world.complete()
    world.drain()
    assert all(s.finish is not None and s.finish.reason is FinishReason.LENGTH for s in streams)
