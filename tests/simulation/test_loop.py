"""Rules of docs/invariants.md about plans, blocks, seats and stalls, each in one short scenario."""

import numpy as np
import pytest

from protocol.codec import encode
from services.scheduler.core.engine import StallError
from services.scheduler.core.limits import Limits
from services.scheduler.core.slots import SlotIds
from services.scheduler.policies import ChunkedPolicy, SchedulerView
from tests.simulation.test_acceptance import ROOMY
from tests.simulation.world import World, params, prompt_of


def test_a_plan_does_not_change_after_it_was_formed() -> None:
    """Two plans are in flight when one of their requests is aborted and another one enters."""
    world = World(ROOMY, 2)
    first = world.add(prompt_of(20), params(9, eos=False))
    world.add(prompt_of(30, seed=1), params(9, eos=False))
    plans = list(world.engine.dispatch())
    frames = [encode(plan) for plan in plans]
    world.abort(first)
    world.add(prompt_of(10, seed=2), params(9, eos=False))
    assert len(plans) == 2
    assert [encode(plan) for plan in plans] == frames


def test_no_request_passes_a_head_that_lacks_blocks() -> None:
    """The first request needs 5 of 8 blocks to its end; the second needs 6 at once, the third only 1."""
    world = World(Limits(4, 64, 64, 8, 4), 2)
    first = world.add(prompt_of(12), params(6, eos=False))
    world.dispatch()
    head = world.add(prompt_of(24, seed=1), params(2, eos=False))
    small = world.add(prompt_of(2, seed=2), params(2, eos=False))
    while first.open:
        assert not head.steps
        assert not small.steps
        world.step()
    world.drain()
    assert (len(head.tokens), len(small.tokens)) == (2, 2)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_lack_of_blocks_preempts_no_request_in_flight(depth: int) -> None:
    """No preempted request has rows in flight, so no token is delivered late."""
    world = World(Limits(4, 64, 64, 10, 4), depth)
    for i in range(4):
        world.add(prompt_of(8, seed=i), params(16, eos=False))
    world.drain()
    assert world.store.counters["num_preemptions"] > 0
    assert world.coverage["stale deliveries"] == 0


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_slot_behind_its_fence_holds_up_no_admission(depth: int) -> None:
    """One seat; its request is aborted with every step in flight, and the next one enters with the next step."""
    world = World(Limits(1, 64, 64, 32, 4), depth)
    first = world.add(prompt_of(8), params(20, eos=False))
    world.dispatch()
    assert len(world.engine.queue) == depth
    world.abort(first)
    second = world.add(prompt_of(8, seed=1), params(20, eos=False))
    world.complete()
    world.dispatch()
    assert second.steps, "the first one's slot is named by steps in flight, another one is free"
    world.drain()


class NothingRunning(ChunkedPolicy):
    """A policy that leaves every running request out of every step."""

    def order(self, view: SchedulerView) -> SlotIds:
        return np.empty(0, np.int64)


def test_a_stall_is_an_error_with_names() -> None:
    world = World(ROOMY, 1, policy=NothingRunning(), conserves_work=False)
    world.add(prompt_of(8), params(5, eos=False))
    world.step()
    with pytest.raises(StallError, match="1 running, 0 waiting"):
        world.dispatch()
