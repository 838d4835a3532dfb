"""The number of drafts, chosen by acceptance and time, on a simulated device with known costs."""

import sys
from typing import NamedTuple

import numpy as np
import pytest

from services.config import SpeculativeConfig
from services.scheduler.core.drafting import (
    LEARNS,
    Acceptance,
    AdaptiveDrafting,
    Drafting,
    FixedDrafting,
    StepSeconds,
    drafting_from_config,
)
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.slots import Column

MOST = 4


class DeviceModel(NamedTuple):
    """Times in milliseconds; `noise` is the standard deviation of their logarithm."""

    rows: int = 8
    acceptance: float = 0.7
    offered: float = 1.0
    """Share of the rows that get drafts."""
    step: float = 2.0
    token: float = 0.05
    draft: float = 0.05
    reads: float = 0.0
    """Cost of the drafter's input, which it gets in all steps but those of a rest."""
    noise: float = 0.15
    interrupted: float = 0.02
    """Share of the steps that take five times as long."""


class DraftingRun(NamedTuple):
    rate: float
    """Tokens per millisecond."""
    chosen: list[int]
    trials: list[bool]
    rests: list[bool]


STEPS = 1500


class DeviceDraws:
    """Random numbers of a device.

    Attributes:
        offered: bool[steps, rows], the rows that get drafts
        accepted: int[steps, rows], how many would be accepted
        delays: float[steps], factors of the steps' times
    """

    def __init__(self, device: DeviceModel, steps: int, seed: int) -> None:
        rng, rows = np.random.default_rng(seed), device.rows
        self.offered = rng.random((steps, rows)) < device.offered
        self.accepted = (rng.random((steps, rows, MOST)) < device.acceptance).cumprod(axis=2).sum(axis=2)
        noise = np.exp(rng.normal(0, device.noise, steps))
        self.delays = noise * np.where(rng.random(steps) < device.interrupted, 5, 1)


def run(policy: Drafting, device: DeviceModel, steps: int = STEPS, seed: int = 0) -> DraftingRun:
    """Run with two steps in flight: the cost of a step is known after the next one was planned."""
    drawn, rows, took, tokens = DeviceDraws(device, steps, seed), device.rows, 0.0, 0
    chosen, trials, rests, flying, planned, now = [], [], [], [], 0, 1.0
    ones, slots, samples = np.ones(rows, np.int32), np.arange(rows), np.ones(rows, np.bool_)
    columns = [
        (slots, ones, ones, ones + drafts, samples, drafts * ones, rows * (1 + drafts)) for drafts in range(MOST + 1)
    ]
    for step_id, delay in enumerate(drawn.delays.tolist(), 1):
        proposes = policy.length(rows)
        chosen.append(proposes)
        trials.append(policy.is_trial)
        rests.append(policy.rests)
        drafted = planned * drawn.offered[step_id - 1].astype(np.int32)
        counts = 1 + np.minimum(drafted, drawn.accepted[step_id - 1]).astype(np.int32)
        busy = device.draft * proposes + device.reads * (not policy.rests)
        time = delay * (device.step + device.token * int(rows + drafted.sum()) + busy)
        now += time * 1e-3
        step = InflightStep(step_id, *columns[planned], proposes, policy.is_trial, policy.rests)
        flying.append((step, drafted, counts, now))
        if len(flying) == 2:
            policy.observe(*flying.pop(0))
        took, tokens, planned = took + time, tokens + int(counts.sum()), proposes
    return DraftingRun(tokens / took, chosen, trials, rests)


DEVICES = {
    "drafts cost little": DeviceModel(rows=1),
    "tokens cost much": DeviceModel(token=0.25, draft=0.3),
    "few rows have drafts": DeviceModel(token=0.25, draft=0.03, offered=0.4),
    "many rows": DeviceModel(rows=64, acceptance=0.6, token=0.2, draft=0.5),
    "the drafter's input costs much": DeviceModel(step=1.0, token=0.02, draft=0.4, reads=0.7),
    "drafts pay although their input costs much": DeviceModel(step=1.0, token=0.02, reads=0.7),
    "noise": DeviceModel(rows=1, token=0.2, draft=0.3, noise=0.3, interrupted=0.1),
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_nearly_as_good_as_the_best_number_for_the_device(device: DeviceModel) -> None:
    def fixed(number: int, seed: int) -> float:
        drawn = DeviceDraws(device, STEPS, seed)
        drafted = number * drawn.offered
        times = device.step + device.token * (device.rows + drafted.sum(1)) + device.draft * number
        times += device.reads * (number > 0)
        return float((1 + np.minimum(drafted, drawn.accepted)).sum() / (drawn.delays @ times))

    seeds = range(4)
    best = max(np.mean([fixed(number, seed) for seed in seeds]) for number in range(MOST + 1))
    lead = 16 if device.reads else 0
    assert np.mean([run(AdaptiveDrafting(MOST, lead), device, seed=seed).rate for seed in seeds]) > 0.94 * best


def test_while_no_drafts_pay_speculation_rests_but_for_trials() -> None:
    """Before a trial after a rest, the drafter gets its input again."""
    policy = AdaptiveDrafting(MOST, lead=3)
    seen = run(policy, DeviceModel(acceptance=0.0, token=0.2), 4000)
    late = [*zip(seen.chosen, seen.trials, seen.rests, strict=True)][-2000:]
    assert sum(rests for *_, rests in late) > 1900
    assert not any(rests and (number or trial) for number, trial, rests in late)
    begins = [at for at in range(3, len(late)) if late[at][1] and not late[at - 1][1]]
    assert begins
    for at in begins:
        assert late[at][0] > 0
        assert late[at - 3 : at] == [(0, False, False)] * 3


def test_trials_lose_one_per_cent_with_the_input_of_a_head() -> None:
    device = DeviceModel(acceptance=0.0, token=0.2, reads=0.7, noise=0, interrupted=0)
    seen = run(AdaptiveDrafting(MOST, lead=16), device, 12_000)
    chosen, rests = seen.chosen[4000:], seen.rests[4000:]
    lost = sum(chosen) * (device.draft + device.rows * device.token) + rests.count(False) * device.reads
    assert any(chosen)
    assert lost < 0.011 * (lost + len(chosen) * (device.step + device.rows * device.token))


def test_trials_begin_at_least_forty_steps_apart() -> None:
    trials = run(AdaptiveDrafting(MOST), DEVICES["tokens cost much"]).trials
    begins = [at for at in range(1, len(trials)) if trials[at] and not trials[at - 1]]
    assert min(np.diff(begins)) == 40


def test_a_step_of_a_rest_costs_two_calls() -> None:
    policy = AdaptiveDrafting(MOST)
    run(policy, DeviceModel(acceptance=0.0, token=0.2, noise=0, interrupted=0, step=0.3), 4000)
    while not policy.rests or policy.is_trial:
        policy.length(8)
    ones, calls = np.ones(8, np.int32), list[str]()
    columns = np.arange(8), ones, ones, ones, ones > 0, 0 * ones, 8
    step = InflightStep(LEARNS, *columns, 0, rests=True)

    def count(frame: object, event: str, what: object) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    sys.setprofile(count)
    try:
        policy.length(8)
        policy.observe(step, 0 * ones, ones, 1.0)
    finally:
        sys.setprofile(None)
    assert policy.rests
    assert len(calls) == 2 + 1, "with the one that ends the count"


def test_acceptance_is_that_of_the_last_steps_and_a_failure_stays_known() -> None:
    acceptance, ones = Acceptance(1), np.ones(8, np.int32)

    def after(accepted: int, steps: int) -> float:
        """Return the probability of a draft after steps in which all drafts were accepted, or none."""
        for _ in range(steps):
            acceptance.pass_time(0.05, 1)
            acceptance.add(ones, ones, ones + accepted)
        return acceptance.per_row()[0][1] - 1

    assert after(0, 200) < 0.01
    assert after(1, 200) > 0.95, "steps decay"
    assert after(0, 200) < 0.05
    acceptance.pass_time(1e6, 1_000_000)
    assert after(0, 0) < 0.05, "without drafts nothing decays"
    acceptance.add(ones[:1], ones[:1], ones[:1])
    assert 0.2 < after(0, 0) < 0.3, "all rows before count as one that failed"


def test_a_row_computes_the_drafts_that_it_had() -> None:
    acceptance, ones = Acceptance(2), np.ones(8, np.int32)
    for _ in range(100):
        acceptance.pass_time(0.05, 1)
        acceptance.add(2 * ones, np.array([0, 2, 2, 2, 1, 1, 1, 1], np.int32), ones)
    assert acceptance.per_row()[1] == pytest.approx([1, 1 + 7 / 8, 1 + 7 / 8 + 3 / 8], abs=0.01)


def test_a_slower_machine_is_expected_at_every_load() -> None:
    known = StepSeconds(1)
    for loads, seconds in (((2, 4, 7), 0.001), ((2, 7), 0.0015)):
        for at in range(200):
            known.pass_time(0.05, 1)
            known.observe(loads[at % len(loads)], 0, 0, False, 0, seconds, True)
    assert known.expected(4, [1.0, 1.0])[0] == pytest.approx(0.0015, rel=0.05)


def test_drafts_that_begin_to_work_are_noticed() -> None:
    policy = AdaptiveDrafting(MOST)
    assert run(policy, DeviceModel(acceptance=0.0, token=0.2)).chosen[-200:].count(0) > 180
    assert np.mean(run(policy, DeviceModel(acceptance=0.95), 3000).chosen[-200:]) > MOST - 1
    fails = run(policy, DeviceModel(acceptance=0.0, token=0.2))
    assert any(fails.rests)
    verifies = zip(fails.chosen, fails.rests[1:], strict=False)
    assert not any(drafts and rests for drafts, rests in verifies), "a step of a rest verifies no drafts"


class DelayedOnce(AdaptiveDrafting):
    """A step of a trial that verifies another number than it proposes takes a second longer."""

    delayed, delay = 0, 0.0

    def observe(self, step: InflightStep, drafted: Column, counts: Column, sampled: float) -> None:
        if not self.delayed and step.step_id > 500 and step.is_trial and step.drafts[0] != step.proposes:
            self.delayed, self.delay = step.step_id, 1.0
        super().observe(step, drafted, counts, sampled + self.delay)


def test_another_delay_within_a_trial_does_not_end_trials() -> None:
    policy = DelayedOnce(MOST)
    trials = run(policy, DeviceModel(noise=0, interrupted=0)).trials
    assert any(trials[policy.delayed + 20 :])


def test_a_draft_needs_a_higher_probability_if_its_row_costs_more() -> None:
    chances = []
    for token in (0.01, 0.1, 0.5):
        policy = AdaptiveDrafting(MOST)
        run(policy, DeviceModel(token=token, noise=0.02, interrupted=0))
        chances.append(policy.min_acceptance)
    assert 0 <= chances[0] < chances[1] < chances[2] <= 0.5
    assert FixedDrafting(MOST).min_acceptance == 0, "a fixed number proposes all"


def test_configured() -> None:
    assert drafting_from_config(None).length(4) == 0
    fixed = drafting_from_config(SpeculativeConfig(method="ngram", num_speculative_tokens=5, adaptive=False))
    assert isinstance(fixed, FixedDrafting)
    assert fixed.length(1) == fixed.length(1000) == 5
    assert isinstance(
        drafting_from_config(SpeculativeConfig(method="ngram", num_speculative_tokens=5)), AdaptiveDrafting
    )


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram", "num_speculative_tokens": 0},
        {"method": "ngram", "num_speculative_tokens": 3, "model": "x"},
        {"method": "draft_model", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 6},
        {"method": "medusa", "num_speculative_tokens": 3},
        {"method": "ngram", "num_speculative_tokens": 3, "unheard_of": 1},
    ],
)
def test_an_invalid_configuration_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"method|num_speculative_tokens|prompt_lookup_min|unheard_of"):
        SpeculativeConfig.model_validate(given)
