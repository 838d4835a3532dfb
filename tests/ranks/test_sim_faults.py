"""Each fault between ranks is made once, and the rank that meets it raises an error that names it."""

from collections.abc import Callable

import msgspec
import pytest

from protocol.codec import pack
from protocol.sampling import SamplingParams
from protocol.steps import SchedulerOutput
from services.worker.backends.sim.ranks.group_exchange import HEADER
from tests.ranks.failures import RankFailure
from tests.ranks.sim_group import MakeGroup, SimGroup
from tests.unit.worker.plans import BLOCK, VOCAB, PlanBuilder, alone, prompt, sampled, tokens

TOKENS = 6
"""Length of each prompt."""


class StagedRequests:
    """Two requests whose prompts were computed in one step on all ranks; their tokens are back at the first stage."""

    def __init__(self, group: SimGroup) -> None:
        self.group, self.plans = group, PlanBuilder()
        self.a, self.b = (self.plans.admit(prompt(seed, TOKENS), sampled(seed)) for seed in (1, 2))
        self.step()
        self.group.results()

    def step(self) -> SchedulerOutput:
        plan = self.plans.step(self.a, self.b)
        self.group.launch(plan)
        return plan


# -- between stages ----------------------------------------------------------------------------------------------


def test_undisturbed_stages_give_the_tokens_of_one_rank(make_group: MakeGroup) -> None:
    running = StagedRequests(make_group(1, 2))
    running.step()
    running.step()
    got = [tokens(result) for result in running.group.results()]
    for request, seed in ((running.a, 1), (running.b, 2)):
        assert [step[request.slot] for step in got] == alone(prompt(seed, TOKENS), sampled(seed), 3)[1:]


def test_lost_feedback(make_group: MakeGroup) -> None:
    """The first stage notices it by the step of the next message."""
    running = StagedRequests(make_group(1, 2))
    running.group.stage(1).call("drop_feedback")
    first = running.plans.step(running.a)
    second = running.plans.step(running.b)
    third = running.plans.step(running.a)
    for plan in (first, second, third):
        running.group.launch(plan)
    with pytest.raises(
        RankFailure, match="OracleError: step 2 needs its sampled ids, but those of step 3 came"
    ):
        running.group.stage(0).last_answer()


def test_feedback_of_two_rows_swapped(make_group: MakeGroup) -> None:
    """The last stage notices it: it has the tokens that it sampled."""
    running = StagedRequests(make_group(1, 2))
    running.group.stage(1).call("swap", "send_feedback", HEADER, HEADER + 1)
    running.step()
    running.step()
    with pytest.raises(
        RankFailure, match=r"OracleError: slot \d position 7: token \d+ of 97 came from the stage before"
    ):
        running.group.stage(1).last_answer()


@pytest.mark.parametrize("by", [VOCAB, -VOCAB])
def test_feedback_outside_the_vocabulary(make_group: MakeGroup, by: int) -> None:
    """Valid ids: it never becomes an index."""
    running = StagedRequests(make_group(1, 2))
    running.group.stage(1).call("shift", "send_feedback", HEADER, by)
    running.step()
    running.step()
    with pytest.raises(RankFailure, match=r"OracleError: slot 0 position 7: token -?\d+ is not among the 97"):
        running.group.stage(0).last_answer()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([HEADER, HEADER + 1], r"slot 0 position 6: token \d+ of 97 came from the stage before, but \d+ is known here"),
        ([HEADER + 2, HEADER + 3], r"slot 0 position 6: expected the activation [0-9a-f]{16} from the stage before"),
    ],
    ids=["tokens", "hashes"],
)  # fmt: skip
def test_two_rows_of_activations_swapped(make_group: MakeGroup, words: list[int], text: str) -> None:
    running = StagedRequests(make_group(1, 2))
    running.group.stage(0).call("swap", "send_activations", *words)
    running.step()
    with pytest.raises(RankFailure, match="OracleError: " + text):
        running.group.stage(1).last_answer()


def test_another_token_for_a_middle_stage(make_group: MakeGroup) -> None:
    """A middle stage has no other source for a sampled token; the hash in the message does not match it."""
    running = StagedRequests(make_group(1, 3))
    running.group.stage(0).call("shift", "send_activations", HEADER, 1)
    running.step()
    with pytest.raises(RankFailure, match="OracleError: slot 0 position 6: expected the activation"):
        running.group.stage(1).last_answer()


def test_a_token_outside_the_vocabulary_between_stages(make_group: MakeGroup) -> None:
    """Valid ids: it never becomes an index."""
    running = StagedRequests(make_group(1, 3))
    running.group.stage(0).call("shift", "send_activations", HEADER, VOCAB)
    running.step()
    with pytest.raises(RankFailure, match=r"slot 0 position 6: token 1\d\d of 97 .* but -1 is known here"):
        running.group.stage(1).last_answer()


def test_activations_of_another_step(make_group: MakeGroup) -> None:
    running = StagedRequests(make_group(1, 2))
    running.group.stage(0).call("repeat_activations")
    running.step()
    running.step()
    with pytest.raises(
        RankFailure, match="OracleError: step 3 needs its activations, but those of step 2 came"
    ):
        running.group.stage(1).last_answer()


def test_plans_in_another_order(make_group: MakeGroup) -> None:
    """Plan agreement: the second stage gets two plans of equal size in the wrong order."""
    running = StagedRequests(make_group(1, 2))
    first, second = running.plans.step(running.a), running.plans.step(running.b)
    for rank, plans in zip(running.group.ranks, ((first, second), (second, first)), strict=True):
        for plan in plans:
            running.group.launch_on(rank, plan)
    with pytest.raises(
        RankFailure, match="OracleError: step 3 needs its activations, but those of step 2 came"
    ):
        running.group.stage(1).last_answer()


def test_a_later_stage_checks_its_own_cache(make_group: MakeGroup) -> None:
    """A block table that is wrong on one stage only."""
    running = StagedRequests(make_group(1, 2))
    late = running.plans.admit(prompt(5, 2 * BLOCK + 1))
    plan = running.plans.step(late)
    wrong = msgspec.structs.replace(plan.new[0], block_ids=pack([running.a.blocks[0], *late.blocks[1:]]))
    running.group.launch_on(running.group.stage(0), plan)
    running.group.launch_on(running.group.stage(1), msgspec.structs.replace(plan, new=[wrong]))
    both = running.plans.step(running.a, running.b)
    running.group.launch(both)
    with pytest.raises(RankFailure, match=rf"OracleError: slot {running.a.slot} position \d block"):
        running.group.stage(1).last_answer()


def test_a_step_that_fails_sends_nothing_on(make_group: MakeGroup) -> None:
    """The first stage refuses a token; the second one waits for its activations until the epoch is aborted."""
    group, plans = make_group(1, 2), PlanBuilder()
    group.launch(plans.step(plans.admit([97])))
    with pytest.raises(RankFailure, match="OracleError: slot 0 position 0: token 97 is not among the 97"):
        group.stage(0).last_answer()
    group.abort()
    with pytest.raises(RankFailure, match="RanksLost"):
        group.stage(1).last_answer()


# -- between ranks of a stage ------------------------------------------------------------------------------------


def _other_prompt(plan: SchedulerOutput) -> SchedulerOutput:
    other = msgspec.structs.replace(plan.new[0], token_ids=pack(prompt(9, TOKENS)))
    return msgspec.structs.replace(plan, new=[other, *plan.new[1:]])


def _other_seed(plan: SchedulerOutput) -> SchedulerOutput:
    params = SamplingParams(max_tokens=64, temperature=1.0, seed=77)
    return msgspec.structs.replace(
        plan, new=[plan.new[0], msgspec.structs.replace(plan.new[1], params=params)]
    )


def _other_step(plan: SchedulerOutput) -> SchedulerOutput:
    return msgspec.structs.replace(plan, step_id=9)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_other_prompt, r"slot 0: the activation is -?\d+ here and -?\d+ on tensor-parallel rank {}"),
        (_other_seed, r"slot 1: the token is \d+ here and \d+ on tensor-parallel rank {}"),
        (_other_step, r"step \d meets step \d of tensor-parallel rank {}"),
    ],
)
def test_ranks_of_a_stage_that_disagree(
    make_group: MakeGroup, change: Callable[[SchedulerOutput], SchedulerOutput], text: str
) -> None:
    """Both ranks notice it, so the output rank does not report a result that differs on the other."""
    group, plans = make_group(2, 1), PlanBuilder()
    plan = plans.step(*(plans.admit(prompt(seed, TOKENS), sampled(seed)) for seed in (1, 2)))
    group.launch_on(group.ranks[0], plan)
    group.launch_on(group.ranks[1], change(plan))
    for rank, other in ((0, 1), (1, 0)):
        with pytest.raises(RankFailure, match="OracleError: " + text.format(other)):
            group.ranks[rank].last_answer()
