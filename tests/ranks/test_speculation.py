"""Drafts in a team of real ranks: one rank proposes, all verify (spec 2(e) 2)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.membership import Speculation
from tests.integration.native.conftest import Family
from tests.integration.native.driver import Driver
from tests.ranks.group import Group, GroupDriver, Process
from tests.ranks.test_equality import TOKENS, prompts

WANTED: dict[str, Callable[[Path], Speculation]] = {
    "ngram": lambda model: Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3),
    "draft_model": lambda model: Speculation("draft_model", 3, str(model)),
}


@pytest.fixture
def take(pool: object) -> Callable[[int], list[Process]]:
    return pool.take  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("method", WANTED)
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_equal_one_rank_without_drafts(
    tied: Family, take: Callable[[int], list[Process]], method: str, depth: int
) -> None:
    """S2-1 over ranks; only the output rank has a drafter, its memory and nobody else's."""
    wanted = WANTED[method](tied.path)
    group = GroupDriver(Group(take(2), tied.path, 2, 1), tied.path, speculation=wanted)
    alone = Driver(tied.path, speculation=wanted)
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


def test_every_rank_goes_on_when_drafts_change_in_number(
    tied: Family, take: Callable[[int], list[Process]]
) -> None:
    """What ranks send one another has a shape that each of them knows from the plan and its own slots."""
    driver = GroupDriver(
        Group(take(2), tied.path, 2, 1), tied.path, speculation=WANTED["draft_model"](tied.path)
    )
    requests = [driver.add(prompt) for prompt in prompts(tied)]
    wanted = [3, 0, 1, 2, 0, 3]
    while any(len(request.output) < TOKENS for request in requests):
        driver.k = wanted[driver.steps % len(wanted)]
        driver.step([(request, request.known - request.computed) for request in requests[driver.steps % 2 :]])
    for request in requests:
        assert request.output[:TOKENS] == tied.reference(request.prompt, TOKENS)[0]
    assert sum(request.accepted for request in requests) > 5
