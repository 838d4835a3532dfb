"""Each fault between ranks is made once, and the rank that meets it raises an error that names it."""

from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from protocol.codec import encode, pack
from protocol.sampling import SamplingParams
from protocol.steps import SchedulerOutput
from services.worker.backends.sim.ranks.group_exchange import HEADER
from tests.ranks.failures import RankFailure
from tests.ranks.sim_group import MakeGroup, SimGroup
from tests.unit.worker.plans import BLOCK, VOCAB, PlanBuilder, prompt, sampled
from tests.waiting import wait_until

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


def test_lost_feedback(make_group: MakeGroup) -> None:
    """The first stage notices it by the step of the next message."""
    running = StagedRequests(make_group(1, 2))
    running.group.stage(1).call("drop_feedback")
    first = running.plans.step(running.a)
    second = running.plans.step(running.b)
    third = running.plans.step(running.a)
    for plan in (first, second, third):
        running.group.launch(plan)
    with pytest.raises(RankFailure, match="OracleError: step 2 needs its sampled ids, but those of step 3 came"):
        running.group.stage(0).last_answer()


SWAPPED = r"slot 0 position 6: token \d+ of 97 came from the stage before, but \d+ is known here"
OTHER_TOKEN = r"slot \d position 7: token \d+ of 97 came from the stage before"
OUTSIDE = r"slot 0 position 7: token -?\d+ is not among the 97"
OTHER_HASH = "slot 0 position 6: expected the activation"
UNKNOWN = r"slot 0 position 6: token 1\d\d of 97 .* but -1 is known here"


@pytest.mark.parametrize(
    ("stages", "sender", "change", "steps", "noticed_by", "text"),
    [
        # The last stage has the tokens that it sampled
        (2, 1, ("swap", "send_feedback", HEADER, HEADER + 1), 2, 1, OTHER_TOKEN),
        # Valid ids: it never becomes an index
        (2, 1, ("shift", "send_feedback", HEADER, VOCAB), 2, 0, OUTSIDE),
        (2, 1, ("shift", "send_feedback", HEADER, -VOCAB), 2, 0, OUTSIDE),
        (3, 0, ("shift", "send_activations", HEADER, VOCAB), 1, 1, UNKNOWN),
        (2, 0, ("swap", "send_activations", HEADER, HEADER + 1), 1, 1, SWAPPED),
        (2, 0, ("swap", "send_activations", HEADER + 2, HEADER + 3), 1, 1, OTHER_HASH + " [0-9a-f]{16} from the"),
        # A middle stage has no other source for a sampled token; the hash in the message does not match it
        (3, 0, ("shift", "send_activations", HEADER, 1), 1, 1, OTHER_HASH),
    ],
    ids=["feedback swapped", "feedback above", "feedback below", "token outside", "tokens swapped", "hashes swapped",
         "another token"],
)  # fmt: skip
def test_a_changed_message(
    make_group: MakeGroup,
    stages: int,
    sender: int,
    change: tuple[str, str, int, int],
    steps: int,
    noticed_by: int,
    text: str,
) -> None:
    running = StagedRequests(make_group(1, stages))
    running.group.stage(sender).call(*change)
    for _ in range(steps):
        running.step()
    with pytest.raises(RankFailure, match="OracleError: " + text):
        running.group.stage(noticed_by).last_answer()


def test_activations_of_another_step(make_group: MakeGroup) -> None:
    running = StagedRequests(make_group(1, 2))
    running.group.stage(0).call("repeat_activations")
    running.step()
    running.step()
    with pytest.raises(RankFailure, match="OracleError: step 3 needs its activations, but those of step 2 came"):
        running.group.stage(1).last_answer()


def test_plans_in_another_order(make_group: MakeGroup) -> None:
    """Plan agreement: the second stage gets two plans of equal size in the wrong order."""
    running = StagedRequests(make_group(1, 2))
    first, second = running.plans.step(running.a), running.plans.step(running.b)
    for rank, plans in zip(running.group.ranks, ((first, second), (second, first)), strict=True):
        for plan in plans:
            running.group.launch_on(rank, plan)
    with pytest.raises(RankFailure, match="OracleError: step 3 needs its activations, but those of step 2 came"):
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


def test_a_wait_for_the_decision_on_masks_ends_with_the_epoch(make_group: MakeGroup) -> None:
    """Not aborted: the ranks leave before the end of the epoch is seen by another thread."""
    group, plans = make_group(2, 1), PlanBuilder()
    request = plans.admit(prompt(1, TOKENS))
    plan = encode(plans.step(request, masked=[request]))
    for command in (("launch", plan), ("leave",)):
        for rank in group.ranks:
            rank.send(*command)
        for rank in group.ranks:
            rank.last_answer()
    for rank in group.ranks:
        wait_until(partial(rank.call, "ended"), "the step has ended")
        with pytest.raises(RankFailure, match="RanksLost"):
            rank.call("result")


def _other_prompt(plan: SchedulerOutput) -> SchedulerOutput:
    other = msgspec.structs.replace(plan.new[0], token_ids=pack(prompt(9, TOKENS)))
    return msgspec.structs.replace(plan, new=[other, *plan.new[1:]])


def _other_seed(plan: SchedulerOutput) -> SchedulerOutput:
    params = SamplingParams(max_tokens=64, temperature=1.0, seed=77)
    return msgspec.structs.replace(plan, new=[plan.new[0], msgspec.structs.replace(plan.new[1], params=params)])


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
