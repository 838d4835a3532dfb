"""Simulated ranks as processes over gloo: tensor and pipeline parallel groups answer as one rank does."""

import subprocess
import sys

import numpy as np
import pytest

from protocol.codec import pack
from protocol.steps import GrammarOutput
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT
from services.worker.distributed.teams import AHEAD
from tests.ranks.sim_group import MakeGroup, RankError, group_fixture  # noqa: F401
from tests.ranks.sim_story import story
from tests.unit.worker.plans import GREEDY, VOCAB, Plans, alone, prompt, tokens

LAYOUTS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_ranks_answer_as_one(make_group: MakeGroup, seed: int, tp: int, pp: int) -> None:
    """All plans are queued ahead. Chunked prompts, prefix hits, steps without a sampling row (spec 3(b) 10), resumed
    requests, and slots that are given away while feedback for them is on its way."""
    told = story(seed)
    assert told.without_sampling
    assert told.shared
    assert told.resumed
    assert told.reused_at_once
    assert any(told.logprobs)
    group = make_group(tp, pp)
    for step in told.steps:
        group.launch(*step)
    results = group.results()
    assert [tokens(result) for result in results] == told.tokens
    assert [result.logprobs for result in results] == told.logprobs


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_grammar_is_applied_on_all_ranks_that_sample(make_group: MakeGroup, tp: int, pp: int) -> None:
    group, plans = make_group(tp, pp), Plans()
    a, b = plans.admit(prompt(1, 6)), plans.admit(prompt(2, 6))
    mask = np.zeros(-(-VOCAB // 32), np.int32)
    mask[1] = 1 << 9
    plan = plans.step(a, b, grammar=True)
    group.launch(plan, GrammarOutput(1, plan.step_id, pack([b.slot]), mask.tobytes()))
    group.launch(plans.step(b))
    first, second = group.results()
    assert tokens(first) == {a.slot: alone(prompt(1, 6), GREEDY, 1)[0], b.slot: 41}
    assert tokens(second)[b.slot] == alone([*prompt(2, 6), 41], GREEDY, 1)[0]


def test_a_warm_up_leaves_nothing_to_the_first_request(make_group: MakeGroup) -> None:
    """S3-4: the canary's id comes back to the first stage when slot and generation have another owner."""
    group, canary, plans = make_group(1, 2), Plans(), Plans()
    canary.step_id = -1
    group.launch(canary.step(canary.admit([0])))
    group.results()
    for rank in group.ranks:
        rank.call("release", [0])
    request = plans.admit(prompt(1, 6))
    for _ in range(3):
        group.launch(plans.step((request, min(request.left, 2))))
    for _ in range(2):
        group.launch(plans.step(request))
    got = [tokens(result).get(request.slot) for result in group.results()]
    assert got == [None, None, *alone(prompt(1, 6), GREEDY, 3)]


def test_what_nobody_needs_is_taken_in_the_end(make_group: MakeGroup) -> None:
    """Requests of one token: no step ever needs their ids, and nothing piles up on any stage."""
    group, plans = make_group(1, 2), Plans()
    steps, results = 100, []
    for number in range(steps):
        request = plans.admit(prompt(number, 2))
        group.launch(plans.step(request))
        plans.leave(request)
        if number % 10 == 9:
            results += group.results()
    assert [tokens(result) for result in results] == [
        {number % 8: alone(prompt(number, 2), GREEDY, 1)[0]} for number in range(steps)
    ]
    assert group.stage(0).call("waiting_feedback") <= MAX_STEPS_IN_FLIGHT + 1
    assert group.stage(0).call("on_their_way")[0] <= AHEAD


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_a_new_epoch_after_an_abort(make_group: MakeGroup, tp: int, pp: int) -> None:
    """One rank gets a plan less than the others, who wait for it until they are told that the epoch is over."""
    group, told = make_group(tp, pp), story(1, 20)
    for step in told.steps[:5]:
        group.launch(*step)
    assert [tokens(result) for result in group.results()] == told.tokens[:5]
    for rank in group.ranks[1:]:
        group.launch_on(rank, *told.steps[5])
    group.abort()
    errors = group.errors()
    assert not errors[0]
    assert errors[tp * pp - 1].startswith("RanksLost")
    for rank in group.ranks:
        rank.call("leave")
    group.join(epoch=2)
    for step in told.steps:
        group.launch(*step)
    assert [tokens(result) for result in group.results()] == told.tokens


def test_waiting_for_a_token_can_be_aborted(make_group: MakeGroup) -> None:
    """The first stage needs an id that the last one was never told to sample."""
    group, plans = make_group(1, 2), Plans()
    request = plans.admit(prompt(1, 6))
    group.launch_on(group.stage(0), plans.step(request))
    group.launch_on(group.stage(0), plans.step(request))
    group.abort()
    with pytest.raises(RankError, match="RanksLost"):
        group.stage(0).last_answer()


def test_a_single_rank_loads_no_torch() -> None:
    code = (
        "import sys; from tests.unit.worker.plans import *; p = Plans(); r = sim_runner(); "
        "run(r, p.step(p.admit([1, 2]))); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
