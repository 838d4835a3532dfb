"""Drafts in a tensor-parallel group of real ranks: one rank proposes, all ranks verify."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.membership import Speculation
from tests.integration.native.conftest import Family
from tests.integration.native.driver import RunnerDriver
from tests.ranks.group import GroupDriver, NativeRankProcess, RankGroup
from tests.ranks.test_equality import TOKENS, prompts

METHODS: dict[str, Callable[[Path], Speculation]] = {
    "ngram": lambda model: Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3),
    "draft_model": lambda model: Speculation("draft_model", 3, str(model)),
}


@pytest.fixture
def take(pool: object) -> Callable[[int], list[NativeRankProcess]]:
    return pool.take  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("method", "depth"),
    [
        ("ngram", 1),
        ("draft_model", 2),
        pytest.param("ngram", 2, marks=pytest.mark.soak),
        pytest.param("draft_model", 1, marks=pytest.mark.soak),
    ],
)
def test_tokens_equal_one_rank_without_drafts(
    tied: Family, take: Callable[[int], list[NativeRankProcess]], method: str, depth: int
) -> None:
    """Same tokens and equal acceptance; only the output rank has a drafter and the memory for it."""
    speculation = METHODS[method](tied.path)
    group = GroupDriver(RankGroup(take(2), tied.path, 2, 1), tied.path, speculation=speculation)
    alone = RunnerDriver(tied.path, speculation=speculation)
    counts = []
    for driver in (group, alone):
        requests = [driver.add(prompt) for prompt in prompts(tied)]
        driver.generate(requests, TOKENS, chunk=13, depth=depth)
        for request in requests:
            assert request.output[:TOKENS] == tied.reference(request.prompt, TOKENS)[0]
        counts.append([(request.drafted, request.accepted) for request in requests])
    assert counts[0] == counts[1]
    assert sum(drafted for drafted, _ in counts[0]) > 0
    if method == "draft_model":
        own, other = (loaded.bytes_per_block for loaded in group.runner.loaded)
        assert own > other
        assert sum(accepted for _, accepted in counts[0]) > 20


def test_drafts_with_unequal_shares_of_kv_heads(
    make_model: Callable[[str], Family], take: Callable[[int], list[NativeRankProcess]]
) -> None:
    """The draft model has all of its heads on the output rank, beside that rank's share of the model."""
    family = make_model("nine-heads")
    speculation = METHODS["draft_model"](family.path)
    driver = GroupDriver(RankGroup(take(2), family.path, 2, 1), family.path, speculation=speculation)
    requests = [driver.add(prompt) for prompt in prompts(family)]
    driver.generate(requests, TOKENS, chunk=13, depth=2)
    for request in requests:
        assert request.output[:TOKENS] == family.reference(request.prompt, TOKENS)[0]
    assert sum(request.accepted for request in requests) > 20


def test_the_number_of_drafts_may_change_in_every_step(
    tied: Family, take: Callable[[int], list[NativeRankProcess]]
) -> None:
    """Plan agreement: each rank derives the shape of every message from the plan and its own slots."""
    driver = GroupDriver(
        RankGroup(take(2), tied.path, 2, 1), tied.path, speculation=METHODS["draft_model"](tied.path)
    )
    requests = [driver.add(prompt) for prompt in prompts(tied)]
    numbers = [3, 0, 1, 2, 0, 3]
    while any(len(request.output) < TOKENS for request in requests):
        driver.k = numbers[driver.steps % len(numbers)]
        driver.step([(request, request.known - request.computed) for request in requests[driver.steps % 2 :]])
    for request in requests:
        assert request.output[:TOKENS] == tied.reference(request.prompt, TOKENS)[0]
    assert sum(request.accepted for request in requests) > 5
