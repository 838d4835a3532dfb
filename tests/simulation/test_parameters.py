"""Every sampling parameter with steps in flight, preemption and chunks, without drafts.

The world compares every token and value with the reference when it arrives.
"""

from dataclasses import replace
from random import Random

import pytest

from protocol.sampling import SamplingParams
from services.scheduler.core.limits import Limits
from services.scheduler.policies import BatchingPolicy
from tests.matrix import covering
from tests.simulation.answer_checks import SimulatedStream
from tests.simulation.drafts import Speculating
from tests.simulation.parameters import MATRIX, OTHERS, STRUCTURED, with_parameters
from tests.simulation.reference import reference
from tests.simulation.world import World, params, prompt_of

VOCAB = 64
STORM = Limits(max_num_seqs=8, max_num_batched_tokens=24, max_model_len=96, num_blocks=12, block_size=16)


def plain(stream: SimulatedStream) -> list[int]:
    """Return the answer of the request without its parameters."""
    bare = SamplingParams(
        max_tokens=stream.params.max_tokens,
        temperature=stream.params.temperature,
        seed=stream.params.seed,
        eos_token_ids=stream.params.eos_token_ids,
    )
    return reference(stream.prompt, bare, STORM.max_model_len, VOCAB).tokens


def storm(
    limits: Limits,
    depth: int,
    name: str,
    requests: int = 20,
    speculating: Speculating | None = None,
    policy: BatchingPolicy | None = None,
) -> World:
    """Requests join and leave in every step, half of them with the parameter, and blocks are short."""
    rng = Random(name)
    world = World(limits, depth, VOCAB, use_priority=True, policy=policy, speculating=speculating)
    others = ("none", name, name, rng.choice(MATRIX))
    while len(world.streams) < requests or world.engine.requests:
        for _ in range(min(rng.choice((1, 1, 2)), requests - len(world.streams))):
            base = params(rng.randint(6, 22), eos=rng.random() < 0.5, seed=rng.choice((None, None, None, 7)))
            sampling, grammar = with_parameters(others[len(world.streams) % 4], base, rng, VOCAB)
            prompt = prompt_of(rng.randint(20, 44), rng.randrange(8))
            world.add(prompt, sampling, priority=rng.choice((0, 0, -1)), structured=grammar)
        while world.compilation.waiting:
            world.compiled(rng.randrange(len(world.compilation.waiting)))
        world.step()
    world.drain()
    return world


def assert_it_shows(world: World, name: str) -> None:
    """The parameter changed answers, or what was delivered with them."""
    asking = world.streams[1::4] + world.streams[2::4]
    greedy = [stream for stream in asking if not stream.params.temperature]
    if "logprobs" in name:
        assert all(stream.scored for stream in asking)
    if name in ("none", "logprobs", "prompt logprobs"):
        assert all(stream.tokens == plain(stream) for stream in asking)
    else:
        changed = [stream for stream in greedy if stream.tokens != plain(stream)]
        assert len(changed) > len(greedy) // 2 > 0


@pytest.mark.parametrize(("name", "depth"), covering(MATRIX + OTHERS, [1, 2, 3], strength=1))
def test_the_permutation_matrix(name: str, depth: int) -> None:
    world = storm(STORM, depth, name)
    assert world.store.counters["num_preemptions"] > 0
    assert world.coverage["chunked prefills"] > 0
    assert world.coverage["resumed"] > 0
    if STRUCTURED in name:
        assert world.coverage["sampling: with a grammar"] > 20
        assert bool(world.coverage["sampling: waits for tokens in flight"]) == (depth > 1)
    assert_it_shows(world, name)


@pytest.mark.parametrize(
    ("name", "stages"), covering([STRUCTURED, f"{STRUCTURED} + penalties + logprobs", "penalties"], [2, 4], strength=1)
)
def test_the_matrix_on_stages(name: str, stages: int) -> None:
    limits = replace(STORM, stages=stages)
    for depth in (stages, stages + 1):
        world = storm(limits, depth, name)
        assert world.store.counters["num_preemptions"] > 0
        assert world.pipeline.stalls == 0
        assert_it_shows(world, name)
