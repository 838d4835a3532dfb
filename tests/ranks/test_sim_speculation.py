"""Drafts on simulated ranks over gloo.

The ranks of the last stage propose, verify and accept the same drafts, and compare them. The first stage receives the
outcome, and every later stage receives the true positions of the rows.
"""

import pytest

from protocol.membership import Speculation
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.worker.backends.sim.ranks.group_exchange import HEADER
from tests.ranks.failures import RankFailure
from tests.ranks.sim_group import MakeGroup, SimGroup
from tests.unit.worker.plans import GREEDY, PlanBuilder, PlannedRunner, SlotRequest, prompt, ragged, sampled, sim_runner
from tests.unit.worker.sim_reference import answer

THREE = Speculation("ngram", 3)
ACCEPTANCE = {"sim_draft_acceptance": "request"}


def record(steps: int, depth: int) -> tuple[list[SchedulerOutput], list[ModelRunnerOutput]]:
    """Return plans that run ahead of their results, and the results of one rank."""
    one = PlannedRunner(sim_runner(speculation=THREE, flags=dict(ACCEPTANCE)), depth)
    params = [sampled(i, logprobs=1) if i % 2 else GREEDY for i in range(4)]
    requests = [one.plans.admit(prompt(i, 5 + i), each) for i, each in enumerate(params)]
    for step in range(steps):
        order = requests[step % 4 :] + requests[: step % 4]
        one.launch(*(order if step % 3 else order[:3]), propose=step % 4)
    one.drain()
    assert [request.outputs for request in requests] == [reference(r) for r in requests]
    return one.steps, one.results


def reference(request: SlotRequest) -> list[int]:
    return answer(request.prompt, request.params, len(request.outputs))


@pytest.mark.parametrize(
    ("tp", "pp", "depth"), [(2, 1, 1), (2, 1, 3), (4, 1, 2), (1, 2, 1), (1, 2, 3), (1, 4, 2), (2, 2, 3)]
)
def test_many_ranks_verify_as_one(make_group: MakeGroup, tp: int, pp: int, depth: int) -> None:
    """Same tokens and equal acceptance; all plans are queued ahead."""
    plans, results = record(24, depth)
    group = make_group(tp, pp, speculation=THREE, **ACCEPTANCE)
    for plan in plans:
        group.launch(plan)
    for got, expected in zip(group.results(), results, strict=True):
        assert ragged(got) == ragged(expected)
        assert got.drafted == expected.drafted
        assert got.logprobs == expected.logprobs
    assert any(len(tokens) > 1 for result in results for tokens in ragged(result).values())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_another_draft_is_noticed_by_all(make_group: MakeGroup, rank: int) -> None:
    """They notice it before anything of the step is reported."""
    group, plans = make_group(2, 1, speculation=THREE, **ACCEPTANCE), PlanBuilder()
    request = plans.admit(prompt(1, 6))
    group.launch(plans.step(request, propose=3))
    group.results()
    request.settle(0, [0])
    group.ranks[rank].call("change_draft", request.slot)
    group.launch(plans.step(request))
    errors = group.errors()
    assert all("the activation is" in error and "tensor-parallel rank" in error for error in errors)
    with pytest.raises(RankFailure):
        group.output.call("results")


class StagedDraft:
    """A request of six tokens on stages; its first token and the drafts after it are back at the first stage."""

    def __init__(self, group: SimGroup) -> None:
        self.group, self.plans = group, PlanBuilder()
        self.request = self.plans.admit(prompt(1, 6))
        self.step()
        (result,) = group.results()
        self.request.settle(0, ragged(result)[self.request.slot])

    def step(self) -> None:
        self.group.launch(self.plans.step(self.request, propose=3))


@pytest.mark.parametrize(
    ("word", "by", "stage", "text"),
    [
        (0, 1, 0, r"4 tokens were sampled from position 7 on, but 10 positions are computed here, or their"),
        (5, -1, 1, r"slot 0 starts at 10 with 3 drafts, but on the stage before at 9 with 3"),
        (5, 1, 0, r"5 tokens came back, with room for 4"),
        (6, 1, 1, r"position 11: token \d+ of 97 came from the stage before, but \d+ is known here"),
    ],
    ids=["another token", "fewer tokens", "more tokens", "another draft"],
)
def test_changed_feedback_is_noticed(make_group: MakeGroup, word: int, by: int, stage: int, text: str) -> None:
    """The message has four ids, their first position, their number and three drafts. The first stage notices a change,
    or the last stage, which sampled the tokens."""
    running = StagedDraft(make_group(1, 2, speculation=THREE, sim_draft_acceptance="always"))
    running.group.stage(1).call("shift", "send_feedback", HEADER + word, by)
    running.step()
    running.step()
    with pytest.raises(RankFailure, match="OracleError: .*" + text):
        running.group.stage(stage).last_answer()


@pytest.mark.parametrize(
    ("word", "by", "stage", "text"),
    [
        (8, 1, 1, r"a row starts at 7, but 6 positions are computed here"),
        (8, -1, 1, r"position 5: expected the activation"),
        (9, -1, 2, r"slot 0 starts at 6 with 3 drafts, but on the stage before at 6 with 2"),
        (9, 1, 1, r"\[4\] drafts on the stage before, but \[3\] are planned"),
    ],
    ids=["later", "earlier", "fewer drafts", "more drafts"],
)
def test_changed_positions_between_stages_are_noticed(
    make_group: MakeGroup, word: int, by: int, stage: int, text: str
) -> None:
    """The message has four ids, four hashes, the start of the row and its number of drafts."""
    running = StagedDraft(make_group(1, 3, speculation=THREE, sim_draft_acceptance="always"))
    running.group.stage(0).call("shift", "send_activations", HEADER + word, by)
    running.step()
    with pytest.raises(RankFailure, match="OracleError: .*" + text):
        running.group.stage(stage).last_answer()
