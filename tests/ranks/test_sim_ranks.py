"""Simulated ranks as processes over gloo: every layout of ranks gives the tokens of one rank."""

import subprocess
import sys

import pytest

from services.worker.distributed.pipeline import STEPS_AHEAD
from services.worker.runner import MAX_STEPS_IN_FLIGHT
from tests.ranks.recorded_run import record
from tests.ranks.sim_group import MakeGroup
from tests.unit.worker.plans import GREEDY, PlanBuilder, alone, prompt, tokens

LAYOUTS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
def test_many_ranks_give_the_tokens_of_one(make_group: MakeGroup, seed: int, tp: int, pp: int) -> None:
    """All plans are queued ahead: chunked prompts, prefix hits, steps without a sampling row (plan agreement), resumed
    requests, grammars, and slots that are assigned again while feedback for them is on its way."""
    recorded = record(seed)
    assert recorded.without_sampling
    assert recorded.shared
    assert recorded.resumed
    assert recorded.reused_at_once
    assert any(recorded.logprobs)
    assert any(recorded.grammars)
    group = make_group(tp, pp)
    for step in recorded.steps:
        group.launch(*step)
    results = group.results()
    assert [tokens(result) for result in results] == recorded.tokens
    assert [result.logprobs for result in results] == recorded.logprobs


def test_feedback_that_no_step_needs_is_received_in_the_end(make_group: MakeGroup) -> None:
    """Requests of one token: no step needs their ids, and messages do not accumulate on any stage."""
    group, plans = make_group(1, 2), PlanBuilder()
    steps, results = 100, []
    for number in range(steps):
        request = plans.admit(prompt(number, 2))
        group.launch(plans.step(request))
        plans.release(request)
        if number % 10 == 9:
            results += group.results()
    assert [tokens(result) for result in results] == [
        {number % 8: alone(prompt(number, 2), GREEDY, 1)[0]} for number in range(steps)
    ]
    assert group.stage(0).call("num_expected_feedback") <= MAX_STEPS_IN_FLIGHT + 1
    assert group.stage(0).call("num_kept_activations") <= STEPS_AHEAD


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_a_new_epoch_after_an_abort(make_group: MakeGroup, tp: int, pp: int) -> None:
    """One rank gets one plan less than the others, which wait for it until the epoch is aborted."""
    group, recorded = make_group(tp, pp), record(1, 20)
    for step in recorded.steps[:5]:
        group.launch(*step)
    assert [tokens(result) for result in group.results()] == recorded.tokens[:5]
    for rank in group.ranks[1:]:
        group.launch_on(rank, *recorded.steps[5])
    group.abort()
    errors = group.errors()
    assert not errors[0]
    assert errors[tp * pp - 1].startswith("RanksLost")
    for rank in group.ranks:
        rank.call("leave")
    group.join(epoch=2)
    for step in recorded.steps:
        group.launch(*step)
    assert [tokens(result) for result in group.results()] == recorded.tokens


def test_a_single_rank_loads_no_torch() -> None:
    code = (
        "import sys; from tests.unit.worker.plans import *; p = PlanBuilder(); r = sim_runner(); "
        "run(r, p.step(p.admit([1, 2]))); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
