"""Drafts through pipeline stages: the last stage proposes and verifies, the first one receives the outcome, and the
others receive the true positions of the rows."""

from collections.abc import Callable
from itertools import cycle

import pytest

from protocol.membership import Speculation
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GREEDY, DrivenRequest, RunnerDriver
from tests.integration.native.test_eagle import prompts
from tests.ranks.group import GroupDriver, NativeRankProcess, RankGroup

TOKENS, BLOCK_SIZE = 24, 16
PARAMS = [GREEDY, SamplingParams(1000, 0.8, seed=3, frequency_penalty=0.3), SamplingParams(1000, 0.6, seed=4)]
METHODS = {
    "ngram": Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3),
    "eagle": Speculation("eagle", 3),
}


@pytest.fixture
def take(pool: object) -> Callable[[int], list[NativeRankProcess]]:
    return pool.take  # type: ignore[attr-defined, no-any-return]


def generated(driver: RunnerDriver, depth: int) -> list[DrivenRequest]:
    """Generate with two alternating microbatches and prompts in chunks."""
    requests = [driver.add(prompt, PARAMS[i % 3]) for i, prompt in enumerate(prompts())]
    driver.interleave([requests[::2], requests[1::2]], TOKENS, chunk=7, depth=depth)
    return requests


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    driver = RunnerDriver(DEMO_MODEL, block_size=BLOCK_SIZE, dtype="float32")
    return [request.output for request in generated(driver, 1)]


@pytest.mark.parametrize(("method", "tp", "depth"), [("ngram", 1, 3), ("eagle", 1, 5), ("eagle", 2, 2)])
def test_tokens_equal_one_rank_without_drafts_and_acceptance_one_with_them(
    take: Callable[[int], list[NativeRankProcess]], plain: list[list[int]], method: str, tp: int, depth: int
) -> None:
    """Same tokens and equal acceptance, greedy and sampled; steps wait in the pipeline, or run ahead of its stages."""
    options = {"block_size": BLOCK_SIZE, "speculation": METHODS[method]}
    group = GroupDriver(RankGroup(take(2 * tp), DEMO_MODEL, tp, 2), DEMO_MODEL, **options)
    many, one = (
        generated(group, depth),
        generated(RunnerDriver(DEMO_MODEL, dtype="float32", **options), depth),
    )
    for ours, expected in zip(many, plain, strict=True):
        assert ours.output[:TOKENS] == expected[:TOKENS]
    assert [(r.drafted, r.accepted) for r in many] == [(r.drafted, r.accepted) for r in one]
    assert sum(r.accepted for r in many) > (10 if method == "ngram" else 30)
    memory = [loaded.bytes_per_block for loaded in group.runner.loaded]
    assert (memory[group.runner.output] > memory[0]) == (method == "eagle"), (
        "only the last stage has the drafter's memory"
    )


def test_middle_stages_use_the_positions_that_they_receive(
    tied: Family, take: Callable[[int], list[NativeRankProcess]]
) -> None:
    """Four stages; the number of drafts changes in each step, also to zero."""
    speculation = Speculation("draft_model", 3, str(tied.path))
    driver = GroupDriver(RankGroup(take(4), tied.path, 1, 4), tied.path, speculation=speculation)
    requests = [driver.add([7 * i + j for j in range(5 + i)]) for i in range(4)]
    lengths = cycle((3, 0, 1, 2, 0))
    while any(len(request.output) < TOKENS for request in requests):
        driver.k = next(lengths)
        some = requests[driver.steps % 2 :]
        driver.step([(request, request.known - request.computed) for request in some])
    for request in requests:
        assert request.output[:TOKENS] == tied.reference(request.prompt, TOKENS)[0]
    assert sum(request.accepted for request in requests) > 20
