"""Drafts with steps in flight: answers equal those without drafts, acceptance equals that of depth one.

The world, its oracle and its checker check each token, the state of each grammar, the counts of each result and the
start of each row when they happen.
"""

from dataclasses import replace

import pytest

from protocol.codec import unpack
from protocol.requests import FinishReason
from services.scheduler.core import deferred_masks
from services.scheduler.core.deferred_masks import MAX_MASK_BYTES
from services.scheduler.core.limits import Limits
from services.scheduler.policies import BalancedPolicy, BatchingPolicy, ChunkedPolicy
from tests.matrix import covering
from tests.simulation.answer_checks import SimulatedStream
from tests.simulation.drafts import ACCEPTANCES, Speculating
from tests.simulation.grammar import structured
from tests.simulation.parameters import MATRIX, STRUCTURED
from tests.simulation.reference import reference
from tests.simulation.test_parameters import STORM, assert_it_shows, storm
from tests.simulation.world import World, params, prompt_of

VOCAB = 64
ROOMY = Limits(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=512, num_blocks=256, block_size=16)
LENGTHS = (1, 2, 3, 5)


def plain(stream: SimulatedStream) -> list[int]:
    return reference(stream.prompt, stream.params, ROOMY.max_model_len, VOCAB).tokens


def steps_of(world: World) -> int:
    return len(world.plans)


# -- acceptance at any depth --------------------------------------------------------------------------------------


def together(acceptance: str, k: int, depth: int, stages: int = 1) -> World:
    """Requests that all run from the first step on, greedy and sampled, and end by every kind of stop."""
    world = World(replace(ROOMY, stages=stages), depth, speculating=Speculating(acceptance, (k,)))
    for i in range(10):
        stops = (i, i + 20) if i % 3 == 0 else ()
        sampling = params(15 + 3 * i, *stops, eos=i % 2 == 0, seed=None if i % 4 < 2 else i)
        world.add(prompt_of(4 + 5 * i, i), sampling)
    world.drain()
    return world


def counted(world: World) -> list[tuple[int, int]]:
    """Return (drafted, accepted) of each request."""
    finishes = [stream.finish for stream in world.streams]
    return [(finish.num_draft_tokens, finish.num_accepted_tokens) for finish in finishes if finish]


@pytest.mark.parametrize(("acceptance", "k"), covering(ACCEPTANCES, LENGTHS, strength=1))
def test_drafted_and_accepted_are_equal_per_request_at_any_depth(acceptance: str, k: int) -> None:
    """Same tokens, equal acceptance, and accepted drafts save steps."""
    synchronous, *ahead = (together(acceptance, k, depth) for depth in (1, 2, 3))
    expected = counted(synchronous)
    assert [counted(world) for world in ahead] == [expected, expected]
    for world in (synchronous, *ahead):
        assert [stream.tokens for stream in world.streams] == [plain(stream) for stream in world.streams]
        assert world.store.counters["num_preemptions"] == 0
    drafted, accepted = (sum(column) for column in zip(*expected, strict=True))
    assert drafted > 100
    assert {"always": accepted > 0.8 * drafted, "never": not accepted}.get(acceptance, 0 < accepted < drafted)
    longest = max(len(stream.tokens) for stream in synchronous.streams)
    assert steps_of(synchronous) == longest if acceptance == "never" else steps_of(synchronous) < longest


# -- storms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "depth"), covering(MATRIX, [1, 2, 3], strength=1))
def test_the_permutation_matrix_with_drafts(name: str, depth: int) -> None:
    """Preemptions, chunks, requests that join and leave in every step; each step draws its number of drafts."""
    how = Speculating("every third", (0, 1, 3, 5), looks_ahead=depth == 2)
    world = storm(STORM, depth, name, speculating=how)
    assert world.store.counters["num_preemptions"] > 0
    assert world.coverage["chunked prefills"] > 0
    assert world.coverage["resumed"] > 0
    assert 0 < world.coverage["drafts: accepted"] < world.coverage["drafts: verified"]
    assert_it_shows(world, name)
    if STRUCTURED in name:
        assert world.coverage["drafts: verified"] < world.coverage["drafts: planned"]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 3, 5, 6, 14])
def test_requests_take_turns_if_a_step_is_too_small_for_their_drafts(budget: int, depth: int) -> None:
    """A request that was left out of steps has its own drafts when it returns, and no invalid id is an input."""
    limits = replace(ROOMY, max_num_batched_tokens=budget)
    world = World(limits, depth, speculating=Speculating("always", (3,)))
    for i in range(6):
        world.add(prompt_of(max(budget // 6, 1), i), params(40, eos=False))
    world.drain()
    last: dict[int, int] = {}
    waited: list[int] = []
    for plan in world.plans:
        slots = unpack(plan.slots).tolist()
        for slot, drafts in zip(slots, unpack(plan.drafts).tolist() or [0] * len(slots), strict=True):
            waited += [plan.step_id - last.get(slot, plan.step_id)] if drafts else []
            last[slot] = plan.step_id
    assert bool(waited) == (budget > 1)
    assert budget == 1 or 1 < max(waited) <= 3, "rows skip steps, in turn"
    assert all(len(stream.tokens) == 40 for stream in world.streams)


# -- ends of rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "depth", "rows"), [(1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 2, 1), (2, 3, 2), (4, 8, 2)]
)
def test_a_request_that_fits_with_its_drafts_ends_and_one_that_does_not_is_refused(
    stages: int, depth: int, rows: int
) -> None:
    """Drafts in flight need blocks behind the last token. A request that can never have these blocks is refused."""
    how, sampling = Speculating("never", (3,)), params(20, eos=False)
    needed = 12 + 20 - 1 + 3 * rows
    for blocks, fits in ((-(-needed // 4), True), (-(-needed // 4) - 1, False)):
        limits = replace(ROOMY, max_model_len=256, num_blocks=blocks, block_size=4, stages=stages)
        world = World(limits, depth, speculating=how)
        stream = world.add(prompt_of(12), sampling)
        world.drain()
        assert (stream.finish.reason is FinishReason.LENGTH, len(stream.tokens)) == (fits, 20 if fits else 0)


# -- grammars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "accepts"), [(1, False), (MAX_MASK_BYTES, True)])
def test_drafts_whose_masks_would_make_a_message_too_large_are_not_accepted(
    most: int, accepts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_masks, "MAX_MASK_BYTES", most)
    world = World(ROOMY, 2, speculating=Speculating("always", (3,)))
    for i in range(4):
        world.add(prompt_of(8, i), params(12, eos=False), structured=structured(i))
    world.drain()
    assert bool(world.coverage["drafts: accepted"]) == accepts


# -- pipeline stages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "shape"), covering([ChunkedPolicy, BalancedPolicy], [(2, 2), (2, 4), (4, 5)], strength=1)
)
def test_the_permutation_matrix_through_stages(policy: type[BatchingPolicy], shape: tuple[int, int]) -> None:
    """Preemptions, chunks, grammars that look ahead. A row waits for the drafts of the row before (stage spacing)."""
    stages, depth = shape
    how = Speculating("every third", (0, 1, 3, 5), looks_ahead=depth == stages)
    for name in (f"{STRUCTURED} + penalties + logprobs", "logprobs"):
        world = storm(replace(STORM, stages=stages), depth, name, speculating=how, policy=policy())
        assert world.store.counters["num_preemptions"] > 0
        assert world.coverage["resumed"] > 0
        assert 0 < world.coverage["drafts: accepted"] < world.coverage["drafts: verified"]
        assert_it_shows(world, name)


@pytest.mark.parametrize(("shape", "k"), covering([(2, 2), (2, 3), (4, 5)], LENGTHS, strength=1))
def test_drafted_and_accepted_are_those_of_one_stage(shape: tuple[int, int], k: int) -> None:
    """Drafts stay valid on their way through the stages, however many requests share it."""
    stages, depth = shape
    expected, world = together("every third", k, 1), together("every third", k, depth, stages)
    assert counted(world) == counted(expected)
    assert [stream.tokens for stream in world.streams] == [stream.tokens for stream in expected.streams]


@pytest.mark.parametrize(("stages", "requests"), [(2, 7), (4, 30)])
def test_drafts_leave_microbatches_even(stages: int, requests: int) -> None:
    """After two rounds no two steps differ by more than one row and its drafts."""
    limits = replace(ROOMY, max_num_seqs=64, stages=stages)
    world = World(limits, stages + 1, policy=BalancedPolicy(), speculating=Speculating("always", (3,)))
    for i in range(requests):
        world.add(prompt_of(5, i), params(60, eos=False))
    while len(world.plans) < 6 * stages:
        world.step()
    sizes = [len(plan.slots) // 4 for plan in world.plans[3 * stages : 6 * stages]]
    assert max(sizes) - min(sizes) <= 1
    tokens = [sum(unpack(plan.counts).tolist()) for plan in world.plans[3 * stages : 6 * stages]]
    assert tokens == [4 * size for size in sizes]
