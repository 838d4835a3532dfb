"""Lengths, sharing, and stops."""

from collections.abc import Callable
from random import Random

import pytest

from protocol.requests import FinishReason
from protocol.sampling import SamplingParams
from protocol.steps import NewRequest
from services.scheduler.core.limits import Limits
from tests.simulation.reference import ExpectedAnswer, reference
from tests.simulation.world import EOS, World, params, prompt_of

DEPTHS = [1, 2, 3, 5]
ROOMY = Limits(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=512, num_blocks=256, block_size=16)


def prompt_whose_answer(sampling: SamplingParams, fits: Callable[[ExpectedAnswer], bool]) -> list[int]:
    """Return a prompt of 20 tokens whose reference answer satisfies the condition."""
    for seed in range(10_000):
        prompt = prompt_of(20, seed)
        if fits(reference(prompt, sampling, ROOMY.max_model_len, 64)):
            return prompt
    raise LookupError("no prompt has such an answer")


def entered(world: World, index: int) -> tuple[NewRequest, int, int]:
    """Return the `index`-th request that entered a slot, with start and count of its first row."""
    found = []
    for plan in world.plans:
        columns = (memoryview(column).cast("i").tolist() for column in (plan.slots, plan.starts, plan.counts))
        rows = {slot: (start, count) for slot, start, count in zip(*columns, strict=True)}
        found += [(new, *rows[new.slot]) for new in plan.new]
    return found[index]


def test_the_numbers_of_a_request_after_each_event() -> None:
    """A prompt of 100 tokens, max_tokens=3, depth 2: (T, P, H, F) after each event, and no step 4."""
    world = World(ROOMY, 2)
    world.add(prompt_of(100), params(3, eos=False))

    def now() -> tuple[int, ...]:
        s = world.epoch.slots
        return tuple(int(column[0]) for column in (s.tokens, s.computed, s.placeholders, s.inflight))

    world.dispatch()
    assert (len(world.plans), now()) == (2, (100, 101, 2, 101))
    world.complete()
    assert now() == (101, 101, 1, 1)
    world.dispatch()
    assert (len(world.plans), now()) == (3, (101, 102, 2, 2))
    world.complete()
    assert now() == (102, 102, 1, 1)
    assert world.dispatch() == 0
    world.drain()
    assert len(world.plans) == 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_output_count_after_an_abort_is_the_steps_processed_before_it(depth: int) -> None:
    world = World(ROOMY, depth)
    streams = [world.add(prompt_of(12, seed=i), params(50, eos=False)) for i in range(10)]
    Random(depth).shuffle(streams)
    world.dispatch()
    for processed, stream in enumerate(streams):
        world.abort(stream)
        assert len(stream.tokens) == processed
        if world.pending:
            world.complete()
        world.dispatch()
    world.drain()
    assert [len(stream.tokens) for stream in streams] == list(range(10))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("length", "rest"), [(40, 8), (48, 16), (33, 1)])
def test_equal_prompts_in_one_step_share_all_full_blocks(length: int, rest: int, depth: int) -> None:
    world = World(ROOMY, depth)
    twins = [world.add(prompt_of(length), params(6, eos=False)) for _ in range(2)]
    world.dispatch()
    assert [new.slot for new in world.plans[0].new] == [0, 1], "both entered in one step"
    for _ in range(3):
        world.step()
        twins.append(world.add(prompt_of(length), params(6, eos=False)))
    world.drain()
    firsts = [entered(world, i)[2] for i in range(5)]
    assert firsts == [length, rest, rest, rest, rest]
    assert len({tuple(twin.tokens) for twin in twins}) == 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_next_turn_recomputes_only_the_unfinished_block(depth: int) -> None:
    world = World(ROOMY, depth)
    turn = world.add(prompt_of(200), params(100, eos=False))
    world.drain()
    world.add(turn.prompt + turn.tokens, params(5, eos=False))
    world.drain()
    _, start, count = entered(world, 1)
    assert (start, count) == (288, 300 % 16)


@pytest.mark.parametrize("depth", DEPTHS)
def test_eos_is_noticed_while_the_next_steps_are_in_flight(depth: int) -> None:
    sampling = params(40)
    prompt = prompt_whose_answer(sampling, lambda a: a.reason is FinishReason.STOP and 4 < len(a.tokens) < 30)
    world = World(ROOMY, depth)
    stream = world.add(prompt, sampling)
    world.drain()
    needed = len(prompt) + len(stream.tokens) - 1
    assert stream.tokens[-1] == EOS
    assert stream.scheduled == needed + depth - 1, "the steps already in flight, and no more"
