"""Adapter seats: a request whose adapter finds no seat waits, and holds back nobody else."""

from dataclasses import replace

import pytest

from services.scheduler.core.limits import Limits
from services.scheduler.policies import BalancedPolicy
from tests.simulation.test_acceptance import DEPTHS
from tests.simulation.workload import ADAPTERS
from tests.simulation.world import World, params, prompt_of

A, B, C = ADAPTERS
LIMITS = Limits(4, 128, 128, 32, 4, max_loras=2)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_request_without_an_adapter_seat_waits_alone(depth: int, stages: int) -> None:
    """It lacks blocks too. Steady load of other adapters does not hold it back for ever."""
    world = World(replace(LIMITS, stages=stages), depth * stages, policy=BalancedPolicy())
    for adapter in (A, B):
        world.add(prompt_of(8), params(20, eos=False), lora=adapter)
    late = world.add(prompt_of(120), params(5, eos=False), lora=C)
    others = [world.add(prompt_of(8), params(5, eos=False), lora=adapter) for adapter in (None, A)]
    while any(stream.open for stream in others):
        world.step()
        assert not late.steps
        assert world.engine.loras() == ([A.name, B.name], [C.name])
    while not late.steps:
        world.add(prompt_of(8), params(5, eos=False), lora=(A, B)[len(world.streams) % 2])
        world.step()
        assert len(world.streams) < 100
    world.drain()


def test_equal_prompts_hit_within_an_adapter_only() -> None:
    world = World(LIMITS, 2)
    hits = []
    for adapter in (None, A, B, A, None):
        stream = world.add(prompt_of(40), params(2, eos=False), lora=adapter)
        world.drain()
        hits.append(stream.hit)
    assert hits == [0, 0, 0, 36, 36]


def test_an_adapter_that_cannot_be_loaded_ends_its_requests_alone() -> None:
    """Also one that waits. What was computed without it is found by nobody, nor what was computed behind that."""
    loads = iter([True, False])
    world = World(LIMITS, 3, loads=lambda: next(loads, True))
    sent = []
    for number, adapter, length, tokens in ((0, A, 9, 1), (1, A, 9, 1), (1, A, 17, 20), (1, None, 9, 20), (2, A, 9, 1)):
        sent.append(world.add(prompt_of(length, number), params(tokens, eos=False), lora=adapter))
        world.dispatch()
    assert sent[2].hit
    world.abort(sent.pop(2))
    world.complete()
    world.complete()  # before the end of the first one is sent
    world.drain()
    assert [stream.finish.reason.name for stream in sent] == ["LENGTH", "ERROR", "LENGTH", "ERROR"]


def test_a_salt_cannot_name_an_adapter() -> None:
    world = World(LIMITS, 2)
    world.add(prompt_of(40), params(2, eos=False), lora=A)
    world.drain()
    forged = world.add(prompt_of(40), params(2, eos=False), salt=f"\0{A.digest}:")
    world.drain()
    assert not forged.hit
