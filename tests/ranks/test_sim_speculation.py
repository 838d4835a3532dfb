"""Drafts on simulated ranks over gloo: the ranks of the last stage propose, verify and accept the same, compared; the
first stage takes in what comes of it, and every other one is told where rows are."""

from collections import deque

import pytest

from protocol.membership import Speculation
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.worker.backends.sim.stage import HEADER
from services.worker.runner import Output
from tests.ranks.sim_group import MakeGroup, RankError, SimGroup, group_fixture  # noqa: F401
from tests.unit.worker.plans import (
    GREEDY,
    Plans,
    Request,
    planned_drafts,
    prompt,
    ragged,
    sampled,
    sim_runner,
)
from tests.unit.worker.sim_reference import answer

THREE = Speculation("ngram", 3)
ACCEPTANCE = {"sim_draft_acceptance": "request"}


def told(steps: int, depth: int) -> tuple[list[SchedulerOutput], list[ModelRunnerOutput]]:
    """Plans that run ahead of what they know, with what one rank alone makes of them."""
    runner, plans = sim_runner(speculation=THREE, flags=dict(ACCEPTANCE)), Plans()
    asked = [sampled(i, logprobs=1) if i % 2 else GREEDY for i in range(4)]
    requests = [plans.admit(prompt(i, 5 + i), params) for i, params in enumerate(asked)]
    made: list[SchedulerOutput] = []
    results: list[ModelRunnerOutput] = []
    flying: deque[Output] = deque()

    def land() -> None:
        result, plan = flying.popleft().get(), made[len(results)]
        assert result is not None
        planned = planned_drafts(plan)
        for slot, tokens in ragged(result).items():
            requests[slot].settle(planned[slot], tokens)
        results.append(result)

    for step in range(steps):
        order = requests[step % 4 :] + requests[: step % 4]
        made.append(plans.step(*(order if step % 3 else order[:3]), propose=step % 4))
        runner.execute_model(made[-1])
        flying.append(runner.sample_tokens(None))
        while len(flying) >= depth:
            land()
    while flying:
        land()
    assert [request.outputs for request in requests] == [reference(r) for r in requests]
    return made, results


def reference(request: Request) -> list[int]:
    return answer(request.prompt, request.params, len(request.outputs))


@pytest.mark.parametrize(
    ("tp", "pp", "depth"), [(2, 1, 1), (2, 1, 3), (4, 1, 2), (1, 2, 1), (1, 2, 3), (1, 4, 2), (2, 2, 3)]
)
def test_many_ranks_verify_as_one(make_group: MakeGroup, tp: int, pp: int, depth: int) -> None:
    """S2-1, S2-2: all plans are queued ahead."""
    plans, results = told(24, depth)
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
    """Before anything of the step is reported."""
    group, plans = make_group(2, 1, speculation=THREE, **ACCEPTANCE), Plans()
    request = plans.admit(prompt(1, 6))
    group.launch(plans.step(request, propose=3))
    group.results()
    request.settle(0, [0])
    group.ranks[rank].call("another_draft", request.slot)
    group.launch(plans.step(request))
    errors = group.errors()
    assert all("the activation is" in error and "tensor-parallel rank" in error for error in errors)
    with pytest.raises(RankError):
        group.output.call("results")


class Running:
    """A request of six tokens on stages, its first token and the drafts after it back at the first one."""

    def __init__(self, group: SimGroup) -> None:
        self.group, self.plans = group, Plans()
        self.request = self.plans.admit(prompt(1, 6))
        self.step()
        (result,) = group.results()
        self.request.settle(0, ragged(result)[self.request.slot])

    def step(self) -> None:
        self.group.launch(self.plans.step(self.request, propose=3))


def test_what_is_undisturbed_passes(make_group: MakeGroup) -> None:
    """Each row runs ahead of what became of the one before: it starts earlier than planned."""
    running = Running(make_group(1, 3, speculation=THREE, sim_draft_acceptance="periodic"))
    for _ in range(4):
        running.step()
    got = [token for result in running.group.results() for token in ragged(result)[running.request.slot]]
    expected = answer(running.request.prompt, GREEDY, 1 + len(got))
    assert got == expected[1:]
    assert 4 < len(got) < 16


@pytest.mark.parametrize(
    ("word", "by", "stage", "text"),
    [
        (
            0,
            1,
            0,
            r"4 tokens were sampled from position 7 on, but 10 positions are computed here, or with",
        ),
        (5, -1, 1, r"a row starts at 10 with 3 drafts, but on the stage before at 9 with 3"),
        (5, 1, 0, r"5 of 4 tokens came back"),
        (6, 1, 1, r"position 11: token \d+ of 97 came from the stage before, \d+ is known here"),
    ],
    ids=["another token", "fewer tokens", "more tokens", "another draft"],
)
def test_a_first_stage_that_is_told_something_else(
    make_group: MakeGroup, word: int, by: int, stage: int, text: str
) -> None:
    """Of an outcome with four ids, where they begin, how many hold, and three drafts: it sees that itself, or the last
    stage does, which knows."""
    running = Running(make_group(1, 2, speculation=THREE, sim_draft_acceptance="always"))
    running.group.stage(1).call("shift", "send_first", HEADER + word, by)
    running.step()
    running.step()
    with pytest.raises(RankError, match="OracleError: .*" + text):
        running.group.stage(stage).last_answer()


@pytest.mark.parametrize(
    ("word", "by", "stage", "text"),
    [
        (8, 1, 1, r"a row starts at 7, 6 positions are computed here"),
        (8, -1, 1, r"position 5: expected the activation"),
        (9, -1, 2, r"a row starts at 6 with 3 drafts, but on the stage before at 6 with 2"),
        (9, 1, 1, r"\[4\] drafts on the stage before, of \[3\]"),
    ],
    ids=["later", "earlier", "fewer drafts", "more drafts"],
)
def test_a_middle_stage_that_is_told_of_another_place(
    make_group: MakeGroup, word: int, by: int, stage: int, text: str
) -> None:
    """Behind four ids and four hashes it says where the row starts, and how many drafts it has."""
    running = Running(make_group(1, 3, speculation=THREE, sim_draft_acceptance="always"))
    running.group.stage(0).call("shift", "send_next", HEADER + word, by)
    running.step()
    with pytest.raises(RankError, match="OracleError: .*" + text):
        running.group.stage(stage).last_answer()
