"""Sampling parameters and a grammar on groups of ranks: the output rank applies the rules with its own token history.

All tensor-parallel ranks of a stage compute the log-probabilities of prompts together.
"""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from protocol.sampling import SamplingParams
from protocol.steps import GrammarOutput
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GREEDY, DrivenRequest, RunnerDriver, i32, ints
from tests.ranks.group import GroupDriver

Start = Callable[..., GroupDriver]
PROMPT = list(range(20, 49))
TOKENS = 16
LAYOUTS = [(2, 1), (1, 2), (2, 2)]


def params_of(**values: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **values)


CASES = [
    params_of(repetition_penalty=1.5, frequency_penalty=0.8, logprobs=3, prompt_logprobs=3),
    params_of(presence_penalty=-2.0, logit_bias=((210, 2.0), (0, 2.0))),
    params_of(bad_words=((168, 83), (0,), (210, 210)), temperature=0.8, seed=3, logprobs=0),
    params_of(allowed_token_ids=i32(0, 7, 83, 168, 210), min_tokens=9, stop_token_ids=(83,)),
    params_of(prompt_logprobs=20),
]


def run(driver: RunnerDriver) -> list[DrivenRequest]:
    """Run in chunks with several steps in flight, and preempt one request, whose slot gets another owner."""
    requests = [driver.add(PROMPT[i:], params) for i, params in enumerate(CASES)]
    driver.generate(requests, 7, chunk=9, depth=3)
    victim = requests[0]
    driver.free_slots.insert(0, victim.slot)
    requests[0] = driver.preempt(victim)
    driver.generate([*requests, driver.add(PROMPT[:3])], TOKENS, chunk=6, depth=3)
    return [*requests, constrained(driver)]


def constrained(driver: RunnerDriver) -> DrivenRequest:
    """Run a request whose mask allows one token, in the padded share of the last rank."""
    request, token, masks = driver.add(PROMPT), 207, np.zeros((1, 7), np.int32)
    masks[0, token // 32] = 1 << token % 32
    plan, slot = driver.plan([(request, len(PROMPT))]), i32(request.slot)
    driver.runner.execute_model(msgspec.structs.replace(plan, has_structured_output_requests=True, masked=slot))
    driver.runner.add_masks(GrammarOutput(1, plan.step_id, slot, masks.tobytes()))
    assert ints(driver.runner.sample_tokens(None).get().token_ids) == [token]
    request.output.append(token)
    driver.generate([request], 4)
    return request


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parameters_on_a_group_equal_those_on_one_rank(tied: Family, start: Start, layout: tuple[int, int]) -> None:
    """Stages change no bit; sums over tensor-parallel ranks may round differently."""
    expected, ours = run(RunnerDriver(tied.path)), run(start(tied.path, *layout))
    assert [request.output for request in ours] == [request.output for request in expected]
    for one, other in zip(expected, ours, strict=True):
        assert other.scores.keys() == one.scores.keys()
        for at, score in one.scores.items():
            if layout[0] == 1:
                assert other.scores[at] == score
            np.testing.assert_allclose(other.scores[at].values, score.values, atol=1e-4, rtol=0)
    lengths = [len(request.scores) for request in ours]
    assert lengths == [28 + TOKENS, 0, TOKENS, 0, 24, 0]
