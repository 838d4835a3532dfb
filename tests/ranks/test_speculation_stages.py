"""Drafts through pipeline stages: the last one proposes and verifies, the first takes them in, and what lies between is
told where rows really are (spec 2(b) 5, 3(b) 10)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from protocol.membership import Speculation
from protocol.sampling import SamplingParams
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GREEDY, Driver, Request
from tests.ranks.group import Group, GroupDriver, Process, RankError
from tests.ranks.test_equality import prompts

TOKENS = 12
SAMPLED = [
    GREEDY,
    SamplingParams(1000, 0.8, seed=3, frequency_penalty=0.3),
    SamplingParams(1000, 1.0, seed=4),
]


@pytest.fixture
def take(pool: object) -> Callable[[int], list[Process]]:
    return pool.take  # type: ignore[attr-defined, no-any-return]


def crowd(driver: Driver, family: Family) -> list[list[Request]]:
    """Two cohorts that take turns in the pipeline."""
    requests = [driver.add(prompt, SAMPLED[i % 3]) for i, prompt in enumerate(prompts(family))]
    return [requests[::2], requests[1::2]]


@pytest.mark.parametrize(("tp", "pp", "depth"), [(1, 2, 2), (1, 4, 2), (2, 2, 2)])
def test_tokens_equal_one_rank(
    tied: Family, take: Callable[[int], list[Process]], tp: int, pp: int, depth: int
) -> None:
    wanted = Speculation("draft_model", 3, str(tied.path))
    group = GroupDriver(Group(take(tp * pp), tied.path, tp, pp), tied.path, speculation=wanted)
    alone = Driver(tied.path)
    cohorts, plain = crowd(group, tied), crowd(alone, tied)
    group.interleave(cohorts, TOKENS, chunk=13, depth=depth)
    alone.interleave(plain, TOKENS)
    for ours, theirs in zip(sum(cohorts, []), sum(plain, []), strict=True):
        assert ours.output[:TOKENS] == theirs.output[:TOKENS]
    print([(r.drafted, r.accepted) for r in sum(cohorts, [])])
    assert sum(r.accepted for r in sum(cohorts, [])) > 10
