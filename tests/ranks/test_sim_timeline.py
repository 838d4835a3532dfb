"""The modelled timeline of a pipeline on a VIRTUAL clock: stages overlap as the formula predicts."""

import pytest

from tests.ranks.sim_group import MakeGroup
from tests.ranks.sim_rank import START
from tests.unit.worker.plans import SLOTS, PlanBuilder, prompt

STAGES, STEP = 4, 0.010
"""STEP: seconds of one stage."""


def test_microbatches_fill_the_pipeline(make_group: MakeGroup) -> None:
    """M equal steps take (P - 1)(t + h) to reach the last stage, then t each, or h if a hop takes longer.

    A hop overlaps the next step of the sender.
    """
    for hop in (0.0, 0.003, 0.015):
        group = make_group(1, STAGES, virtual=True, sim_step_ms=1e3 * STAGES * STEP, sim_hop_ms=1e3 * hop)
        plans = PlanBuilder()
        for seed in range(SLOTS):
            group.launch(plans.step(plans.admit(prompt(seed, 5))))
        results = group.results()
        interval = max(STEP, hop)
        expected = [START + (STAGES - 1) * (STEP + hop) + STEP + m * interval for m in range(SLOTS)]
        assert [result.times.sampled for result in results] == pytest.approx(expected)
        assert [result.times.forward_began for result in results] == pytest.approx([end - STEP for end in expected])
        for stage in range(STAGES - 1):
            begins = [START + stage * (STEP + hop) + m * (interval if stage else STEP) for m in range(SLOTS)]
            times = group.times[group.stage(stage)]
            assert [each.forward_began for each in times] == pytest.approx(begins)
            assert [each.sampled for each in times] == pytest.approx([began + STEP for began in begins])
        group.leave()


def test_a_token_needs_a_round_through_all_stages(make_group: MakeGroup) -> None:
    """A request alone takes P stages, P - 1 hops and the hop back for each token."""
    hop = 0.003
    group, plans = (
        make_group(1, STAGES, virtual=True, sim_step_ms=1e3 * STAGES * STEP, sim_hop_ms=1e3 * hop),
        PlanBuilder(),
    )
    request = plans.admit(prompt(1, 5))
    for _ in range(6):
        group.launch(plans.step(request))
    round_ = STAGES * (STEP + hop)
    assert [result.times.sampled for result in group.results()] == pytest.approx(
        [START + number * round_ - hop for number in range(1, 7)]
    )


def test_as_many_microbatches_as_stages_keep_every_stage_busy(make_group: MakeGroup) -> None:
    """P requests decode in turn: with free hops no stage is idle while tokens return to the first stage."""
    group, plans = make_group(1, STAGES, virtual=True, sim_step_ms=1e3 * STAGES * STEP), PlanBuilder()
    requests = [plans.admit(prompt(seed, 5)) for seed in range(STAGES)]
    first = [plans.step(*requests)]
    for _ in range(2):
        first += [plans.step(request) for request in requests]
    for plan in first:
        group.launch(plan)
    ends = [result.times.sampled for result in group.results()]
    # The first step samples for all four requests, so the next one waits until its tokens have returned.
    assert ends[1:] == pytest.approx([START + (2 * STAGES + number) * STEP for number in range(2 * STAGES)])


def test_a_hop_costs_by_the_token(make_group: MakeGroup) -> None:
    group, plans = (
        make_group(1, 2, virtual=True, sim_step_ms=2e3 * STEP, sim_hop_ms=1.0, sim_hop_token_us=500.0),
        PlanBuilder(),
    )
    request = plans.admit(prompt(1, 12))
    for count in (8, 3):
        group.launch(plans.step((request, count)))
    first, second = (result.times.sampled for result in group.results())
    assert first == pytest.approx(START + 2 * STEP + 0.001 + 8 * 0.0005)
    assert second == pytest.approx(max(START + 3 * STEP + 0.001 + 3 * 0.0005, first + STEP))


def test_the_cost_of_the_whole_model_is_shared_by_its_stages(make_group: MakeGroup) -> None:
    """The tensor-parallel ranks of a stage do not share it."""
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4)):
        group = make_group(tp, pp, virtual=True, sim_step_ms=4.0, sim_prefill_token_us=1000.0)
        plans = PlanBuilder()
        group.launch(plans.step(plans.admit(prompt(1, 8))))
        (result,) = group.results()
        assert result.times.sampled - result.times.forward_began == pytest.approx((0.004 + 8 * 0.001) / pp)
        assert result.times.sampled == pytest.approx(START + 0.012)
        group.leave()
