"""Sampling parameters over whole runs: equal however the work is cut, log-probabilities those of transformers, and no
index that is not a token (valid ids, penalty history; docs/invariants.md)."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.sampling import SamplingParams
from services.worker.backends.native.sampling import logprobs
from services.worker.runner import MAX_STEPS_IN_FLIGHT
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GREEDY, DrivenRequest, RunnerDriver, compute_within, i32
from tests.matrix import covering

PROMPT = list(range(20, 49))
TOKENS = 14
CASES = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": -0.5},
    "bias": {"logit_bias": ((7, 4.0), (210, 3.0), (0, 3.0))},
    "allowed": {"allowed_token_ids": i32(0, 3, 50, 99, 210)},
    "bad words": {"bad_words": ((7,), (210, 0))},
    "min tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(0, 211, 2))},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2},
}


def wanted(**values: object) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **values)


@pytest.fixture
def driver(llama: Family) -> RunnerDriver:
    return RunnerDriver(llama.path)


def alone(driver: RunnerDriver, params: SamplingParams, prompt: list[int] = PROMPT) -> DrivenRequest:
    request = driver.add(prompt, params)
    driver.generate([request], TOKENS)
    driver.finish(request)
    return request


@pytest.mark.parametrize(("name", "temperature"), covering(list(CASES), [0.0, 0.9], strength=1))
def test_chunks_depth_preemption_and_neighbours_change_nothing(
    driver: RunnerDriver, name: str, temperature: float
) -> None:
    """Every other step a neighbour with other parameters joins or leaves."""
    plain = alone(driver, wanted(temperature=temperature, seed=5))
    params = wanted(temperature=temperature, seed=5, **CASES[name])
    if name == "bad words":
        said = plain.output
        params = msgspec.structs.replace(params, bad_words=(tuple(said[:2]), (said[3],), tuple(said[5:9])))
    expected = alone(driver, params)
    assert (expected.output, expected.scores) != (plain.output, plain.scores)
    request, neighbours = driver.add(PROMPT, params), list(CASES.values())
    for until in range(2, TOKENS + 2, 2):
        other = driver.add(PROMPT[until:], wanted(temperature=1.0, **neighbours[until // 2 % 6]))
        driver.generate([other, request], until, chunk=5, depth=3)
        driver.finish(other)
        if until % 6 == 2:
            left, request = request, driver.preempt(request)
            driver.free_slots.append(left.slot)
    assert request.output[:TOKENS] == expected.output
    assert request.scores == expected.scores


def test_logprobs_equal_transformers(family: Family) -> None:
    """Log-probabilities of the prompt, from its second token on, and of the output; ranks and order too."""
    driver = RunnerDriver(family.path)
    both = wanted(logprobs=4, prompt_logprobs=4, frequency_penalty=1.0)
    requests = [driver.add(PROMPT[i:], both) for i in (0, 9)]
    driver.generate(requests, 8, chunk=11)
    for request in requests:
        with torch.no_grad():
            logits = family.model(torch.tensor([request.tokens]), use_cache=False).logits[0].double()
        reference = logits.log_softmax(-1)
        assert sorted(request.scores) == list(range(1, len(request.tokens)))
        for at, (rank, ids, values) in request.scores.items():
            row = reference[at - 1]
            assert ids[0] == request.tokens[at]
            assert len(ids) == 5
            np.testing.assert_allclose(values, row[ids], atol=1e-4, rtol=0)
            close = (row - row[ids[0]]).abs() < 1e-4
            assert int((row > row[ids[0]]).sum()) + 1 <= rank + int(close.sum()) - 1
            assert rank <= int((row > row[ids[0]]).sum()) + int(close.sum())
            assert values[1:] == sorted(values[1:], reverse=True)
            np.testing.assert_allclose(values[1:], row.topk(4).values, atol=1e-4, rtol=0)


def test_prompt_logprobs_in_chunks_and_slices_have_the_same_bits(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = wanted(prompt_logprobs=20)
    once = alone(driver, params)
    assert sorted(once.scores) == list(range(1, len(PROMPT)))
    monkeypatch.setattr(logprobs, "SLICE", 3 * 211)
    seen: list[int] = []
    take = logprobs.PromptScores.take
    monkeypatch.setattr(logprobs.PromptScores, "take", lambda self, x: (seen.append(len(x)), take(self, x))[1])
    assert alone(driver, params).scores == once.scores
    assert seen == [3] * 9 + [1]
    for chunk in (1, 4, len(PROMPT) - 1):
        request, other = driver.add(PROMPT, params), driver.add(PROMPT[3:], params)
        driver.generate([other, request], 2, chunk)
        assert request.scores == once.scores
        assert sorted(other.scores) == list(range(1, len(PROMPT) - 3))
    assert max(seen) == 3


def test_a_result_holds_only_what_its_own_step_scored(driver: RunnerDriver) -> None:
    """Read after later steps have run (immutable result), position after position."""
    request = driver.add(PROMPT, wanted(logprobs=1, prompt_logprobs=0))
    plain = driver.add(PROMPT)
    flying = [driver.launch([(request, count), (plain, count)]) for count in (10, 19, 1, 1)]
    results = [driver.collect(launched) for launched in flying]
    at = [np.frombuffer(result.logprobs.positions, np.int32).tolist() for result in results]
    assert at == [list(range(1, 11)), [*range(11, 29), 29], [30], [31]]
    assert driver.step([(plain, 1)]).logprobs is None


def test_bad_words_and_penalties_read_tokens_that_the_host_has_not_seen(driver: RunnerDriver) -> None:
    """As many steps in flight as there may be, none of them read before the last was launched."""
    params = wanted(bad_words=((7, 7), (3, 3), (7, 3, 7, 3)), frequency_penalty=0.5, logit_bias=((7, 60.0), (3, 59.0)))
    expected = alone(driver, params)
    assert len(set(expected.output)) > 2
    assert all(pair not in {(7, 7), (3, 3)} for pair in zip(expected.output, expected.output[1:], strict=False))
    request = driver.add(PROMPT, params)
    driver.generate([request], TOKENS, depth=MAX_STEPS_IN_FLIGHT)
    assert request.output == expected.output


class IndexTensorWatch(TorchDispatchMode):
    """Checks the index tensors of every torch operation that has any."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.name().partition(".")[0]  # without the overload
        if any(part in name for part in ("index", "gather", "scatter", "embedding", "take", "put")):
            self.seen.add(name)
            indices = [x for arg in args[1:] for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
            for x in indices:
                if isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64) and x.numel():
                    values = args[2:3] if "put" in name else ()  # what is written is no index
                    assert any(x is value for value in values) or int(x.min()) >= 0, name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernels", ["reference", "compiled"])
def test_no_index_operation_ever_sees_a_placeholder(
    llama: Family, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Valid ids: positions without a token hold -1. The reference indexes with torch, where the probe looks; compiled
    kernels fail when they meet one."""
    driver = RunnerDriver(llama.path, kernels=kernels)
    with torch.inference_mode():
        driver.epoch.history.tokens.fill_(-1)
    everything = {key: value for case in CASES.values() for key, value in case.items() if key != "allowed_token_ids"}
    probe = IndexTensorWatch()
    compute_within(probe, monkeypatch)
    requests = [driver.add(PROMPT[i:], wanted(temperature=i * 0.5, **everything)) for i in range(3)]
    driver.generate(requests, 5, chunk=6, depth=4)
    again = [driver.preempt(request) for request in requests[:2]]
    driver.generate([*again, requests[2]], TOKENS, chunk=8, depth=4)
    assert all(len(request.output) == TOKENS for request in requests)
    assert "aten::index" in probe.seen or kernels == "compiled"


def test_the_probe_finds_a_placeholder() -> None:
    with IndexTensorWatch(), pytest.raises(AssertionError, match="index"):
        torch.zeros(3)[torch.tensor([0, -1])]


Make = Callable[[str], Family]


def test_bfloat16_logprobs_are_of_its_own_logits_which_are_float32(make_family: Make) -> None:
    driver = RunnerDriver(make_family("qwen3").path, dtype="bfloat16")
    request = driver.add(PROMPT, wanted(logprobs=2))
    driver.generate([request], 5)
    for step, (at, score) in enumerate(sorted(request.scores.items())):
        row = driver.logits[step][0].log_softmax(-1)
        assert at == len(PROMPT) + step
        np.testing.assert_allclose(score.values, row[score.ids], atol=1e-5, rtol=0)
        assert not torch.equal(driver.logits[step].bfloat16().float(), driver.logits[step])
    known = driver.add(PROMPT + request.output[:4], wanted(prompt_logprobs=2))
    driver.generate([known], 1)
    for at in range(len(PROMPT), len(PROMPT) + 4):
        assert known.scores[at] == request.scores[at]
