"""Drafts in groups of real ranks: one rank of the last stage proposes, all ranks of that stage verify, the first stage
receives the outcome, and the others receive the true positions of the rows."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest

from protocol.membership import Speculation
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from tests.integration.native import test_eagle
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GREEDY, DrivenRequest, RunnerDriver
from tests.ranks.group import GroupDriver, RankGroup, RankPool
from tests.ranks.test_equality import TOKENS, prompts

NGRAM = Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)
PARAMS = [GREEDY, SamplingParams(1000, 0.8, seed=3, frequency_penalty=0.3), SamplingParams(1000, 0.6, seed=4)]
LONG = 24
"""Tokens of a request of the demo model."""


def driver_of(
    pool: RankPool, model: Path, tp: int, pp: int, speculation: Speculation, **options: object
) -> GroupDriver:
    group = RankGroup(pool.take(tp * pp), model, tp, pp)
    return GroupDriver(group, model, speculation=speculation, **options)


def of_itself(family: Family) -> Speculation:
    """The model is its own draft model."""
    return Speculation("draft_model", 3, str(family.path))


@pytest.mark.parametrize(
    ("method", "depth"),
    [
        ("ngram", 1),
        ("draft_model", 2),
        pytest.param("ngram", 2, marks=pytest.mark.soak),
        pytest.param("draft_model", 1, marks=pytest.mark.soak),
    ],
)
def test_tokens_of_two_ranks_equal_one_rank_without_drafts(
    tied: Family, pool: RankPool, method: str, depth: int
) -> None:
    """Same tokens and equal acceptance; only the output rank has a drafter and the memory for it."""
    speculation = NGRAM if method == "ngram" else of_itself(tied)
    group = driver_of(pool, tied.path, 2, 1, speculation)
    alone = RunnerDriver(tied.path, speculation=speculation)
    counts = []
    for driver in (group, alone):
        requests = [driver.add(prompt) for prompt in prompts(tied)]
        driver.generate(requests, TOKENS, chunk=13, depth=depth)
        for request in requests:
            assert request.output[:TOKENS] == tied.reference(request.prompt, TOKENS, request.output)[0]
        counts.append([(request.drafted, request.accepted) for request in requests])
    assert counts[0] == counts[1]
    assert sum(drafted for drafted, _ in counts[0]) > 0
    if method == "draft_model":
        own, other = (loaded.bytes_per_block for loaded in group.runner.loaded)
        assert own > other
        assert sum(accepted for _, accepted in counts[0]) > 20


def test_drafts_with_unequal_shares_of_kv_heads(make_model: Callable[[str], Family], pool: RankPool) -> None:
    """The draft model has all of its heads on the output rank, beside that rank's share of the model."""
    family = make_model("nine-heads")
    driver = driver_of(pool, family.path, 2, 1, of_itself(family))
    requests = [driver.add(prompt) for prompt in prompts(family)]
    driver.generate(requests, TOKENS, chunk=13, depth=2)
    for request in requests:
        assert request.output[:TOKENS] == family.reference(request.prompt, TOKENS, request.output)[0]
    assert sum(request.accepted for request in requests) > 20


@pytest.mark.parametrize("layout", [(2, 1), (1, 4)], ids=str)
def test_the_number_of_drafts_may_change_in_every_step(tied: Family, pool: RankPool, layout: tuple[int, int]) -> None:
    """Plan agreement: each rank derives the shape of every message from the plan and its own slots; middle stages use
    the positions that they receive."""
    driver, lengths = driver_of(pool, tied.path, *layout, of_itself(tied)), cycle((3, 0, 1, 2, 0))
    requests = [driver.add(prompt) for prompt in prompts(tied)]
    while any(len(request.output) < TOKENS for request in requests):
        driver.k = next(lengths)
        driver.step([(request, request.known - request.computed) for request in requests[driver.steps % 2 :]])
    for request in requests:
        assert request.output[:TOKENS] == tied.reference(request.prompt, TOKENS, request.output)[0]
    assert sum(request.accepted for request in requests) > 5


def generated(driver: RunnerDriver, depth: int) -> list[DrivenRequest]:
    """Generate with two alternating microbatches and prompts in chunks."""
    requests = [driver.add(prompt, PARAMS[i % 3]) for i, prompt in enumerate(test_eagle.prompts())]
    driver.interleave([requests[::2], requests[1::2]], LONG, chunk=7, depth=depth)
    return requests


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    driver = RunnerDriver(DEMO_MODEL, block_size=16, dtype="float32")
    return [request.output for request in generated(driver, 1)]


@pytest.mark.parametrize(("method", "tp", "depth"), [("ngram", 1, 3), ("eagle", 1, 5), ("eagle", 2, 2)])
def test_tokens_of_stages_equal_one_rank_without_drafts_and_acceptance_one_with_them(
    pool: RankPool, plain: list[list[int]], method: str, tp: int, depth: int
) -> None:
    """Same tokens and equal acceptance, greedy and sampled; steps wait in the pipeline, or run ahead of its stages."""
    speculation = NGRAM if method == "ngram" else Speculation("eagle", 3)
    group = driver_of(pool, DEMO_MODEL, tp, 2, speculation, block_size=16)
    alone = RunnerDriver(DEMO_MODEL, dtype="float32", block_size=16, speculation=speculation)
    many, one = generated(group, depth), generated(alone, depth)
    for ours, expected in zip(many, plain, strict=True):
        assert ours.output[:LONG] == expected[:LONG]
    assert [(r.drafted, r.accepted) for r in many] == [(r.drafted, r.accepted) for r in one]
    assert sum(r.accepted for r in many) > (10 if method == "ngram" else 30)
    memory = [loaded.bytes_per_block for loaded in group.runner.loaded]
    drafter = memory[group.runner.output] > memory[0]
    assert drafter == (method == "eagle"), "only the last stage has the drafter's memory"
