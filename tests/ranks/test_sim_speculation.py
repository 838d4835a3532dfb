"""Drafts on simulated tensor-parallel ranks over gloo: all ranks propose, verify and accept the same, compared."""

from collections import deque

import pytest

from protocol.membership import Speculation
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.worker.runner import Output
from tests.ranks.sim_group import MakeGroup, RankError, group_fixture  # noqa: F401
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


@pytest.mark.parametrize(("tp", "depth"), [(2, 1), (2, 3), (4, 2)])
def test_many_ranks_verify_as_one(make_group: MakeGroup, tp: int, depth: int) -> None:
    """S2-1, S2-2: all plans are queued ahead."""
    plans, results = told(24, depth)
    group = make_group(tp, 1, speculation=THREE, **ACCEPTANCE)
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
