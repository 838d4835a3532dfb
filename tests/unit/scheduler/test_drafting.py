"""How many drafts are proposed: by what was accepted and what it took, on a device whose costs are known here."""

import random

import numpy as np
import pytest

from services.config import SpeculativeConfig
from services.scheduler.drafting import Adaptive, Fixed, drafting
from services.scheduler.ledger import InflightStep

ROWS = 8


def step(proposes: int, drafts: int) -> InflightStep:
    ones = np.ones(ROWS, np.int32)
    return InflightStep(
        1, np.arange(ROWS), ones, ones, ones + drafts, np.ones(ROWS, np.bool_), ones * drafts, proposes
    )


def lengths(policy: Adaptive, acceptance: float, per_token: float, steps: int = 400) -> list[int]:
    """What it chooses, step after step, on a device that takes 1 ms and `per_token` ms for each computed token."""
    chance, chosen, drafts = random.Random(0), [], 0
    for _ in range(steps):
        chosen.append(policy.length(ROWS))
        counts = np.ones(ROWS, np.int32)
        for row in range(ROWS):
            while counts[row] <= drafts and chance.random() < acceptance:
                counts[row] += 1
        seconds = 1e-3 * (1 + per_token * ROWS * (1 + drafts))
        policy.observe(step(chosen[-1], drafts), np.full(ROWS, drafts, np.int32), counts, seconds)
        drafts = chosen[-1]
    return chosen


def test_drafts_that_are_accepted_and_cost_little_are_proposed_in_full() -> None:
    assert min(lengths(Adaptive(4), 0.9, 0.01)[-200:]) == 4


def test_drafts_that_are_never_accepted_are_given_up_but_for_a_probe() -> None:
    chosen = lengths(Adaptive(4), 0.0, 0.1)[-200:]
    assert chosen.count(0) > 180
    assert max(chosen) >= 1, "what fails now may work later"


def test_the_more_a_token_costs_the_fewer_drafts() -> None:
    cheap, dear = (np.mean(lengths(Adaptive(5), 0.6, cost)[-200:]) for cost in (0.005, 0.2))
    assert dear < cheap


def test_drafts_that_begin_to_work_are_noticed() -> None:
    policy = Adaptive(3)
    assert lengths(policy, 0.0, 0.05)[-100:].count(0) > 80
    assert min(lengths(policy, 0.95, 0.005, 1500)[-100:]) == 3


def test_configured() -> None:
    assert drafting(None) is None
    fixed = drafting(SpeculativeConfig(method="ngram", num_speculative_tokens=5, adaptive=False))
    assert isinstance(fixed, Fixed)
    assert fixed.length(1) == fixed.length(1000) == 5
    assert isinstance(drafting(SpeculativeConfig(method="ngram", num_speculative_tokens=5)), Adaptive)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "num_speculative_tokens": 3, "model": "x"},
        {"method": "draft_model", "num_speculative_tokens": 3},
        {"method": "eagle3", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 6},
        {"method": "medusa", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3, "unheard_of": 1},
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"method|num_speculative_tokens|prompt_lookup_min|unheard_of"):
        SpeculativeConfig.model_validate(given)


def test_eagle_without_a_model_is_the_head_of_the_demo_model() -> None:
    assert SpeculativeConfig(method="eagle", num_speculative_tokens=3).model == ""
