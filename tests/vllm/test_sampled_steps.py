"""Tokens that are on their way to the host, and vLLM's placeholders for them."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.sampled_steps import SampledStep, TokenPlaceholders


class LateOutput(vllm_api.AsyncModelRunnerOutput):
    """vLLM's output of a step; a second call fails as vLLM's does."""

    def __init__(self, tokens: dict[str, int], waits: list[str], name: str = "") -> None:
        self._tokens, self._waits, self._name = tokens, waits, name
        self._read = False

    def get_output(self) -> vllm_api.ModelRunnerOutput:
        assert not self._read
        self._read = True
        self._waits.append(self._name)
        order = list(self._tokens)
        index = {name: row for row, name in enumerate(order)}
        return vllm_api.ModelRunnerOutput(order, index, [[token] for token in self._tokens.values()])


@dataclass
class KnownRequest:
    """The part of vLLM's state of a request that is read."""

    prompt_token_ids: list[int]
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class Steps:
    """Steps in which each row samples one token."""

    def __init__(self, **prompts: list[int]) -> None:
        self.requests: dict[str, Any] = {name: KnownRequest(prompt) for name, prompt in prompts.items()}
        self.placeholders = TokenPlaceholders(self.requests)
        self.waits: list[str] = []

    def step(self, name: str, **tokens: int) -> dict[str, list[int]]:
        """Return the tokens of the requests that enter vLLM's batch, then sample."""
        entering = self.placeholders.begin_step(tokens)
        positions = {}
        for request_id in tokens:
            state = self.requests[request_id]
            positions[request_id] = state.num_prompt_tokens + len(state.output_token_ids)
            state.output_token_ids.append(-1)
        self.placeholders.add(SampledStep(LateOutput(tokens, self.waits, name)), positions)
        return entering


def test_only_the_latest_token_is_a_placeholder_when_the_next_step_begins() -> None:
    steps = Steps(a=[1, 2])
    assert [steps.step(str(n), a=n) for n in range(5)] == [{}] * 5
    assert steps.waits == ["0", "1", "2"]
    assert steps.placeholders.begin_step(["a"]) == {}
    assert steps.waits == ["0", "1", "2", "3"]
    assert steps.requests["a"].output_token_ids == [0, 1, 2, 3, -1]


def test_a_request_that_paused_enters_with_its_tokens_and_waits_for_no_later_step() -> None:
    steps = Steps(a=[1, 2], b=[3])
    steps.step("first", a=10, b=20)
    steps.step("second", b=21)
    assert steps.placeholders.begin_step(["a", "b"]) == {"a": [1, 2, 10]}
    assert steps.waits == ["first"]
    assert steps.requests["b"].output_token_ids == [20, -1]


def test_all_requests_enter_again_behind_a_step_without_rows() -> None:
    steps = Steps(a=[1], b=[3])
    steps.step("first", a=10, b=20)
    steps.step("second", a=11)
    assert steps.placeholders.begin_step(()) == {}
    assert steps.placeholders.begin_step(["a", "b"]) == {"a": [1, 10, 11], "b": [3, 20]}
    assert steps.waits == ["first", "second"]


def test_a_request_that_has_left_is_skipped() -> None:
    steps = Steps(a=[1], b=[3])
    steps.step("first", a=10, b=20)
    del steps.requests["a"]
    steps.placeholders.begin_step(())
    assert steps.step("second", b=21) == {"b": [3, 20]}


def test_a_result_on_the_host_has_no_placeholders() -> None:
    steps = Steps(a=[1])
    steps.requests["a"].output_token_ids = [10]
    result = vllm_api.ModelRunnerOutput(["a"], {"a": 0}, [[10]])
    steps.placeholders.add(SampledStep(result), {"a": 7})
    assert steps.placeholders.begin_step(["a"]) == {"a": [1, 10]}


@pytest.mark.parametrize("first", ["this thread", "another thread"])
def test_a_result_is_read_once_by_two_threads(first: str) -> None:
    waits: list[str] = []
    step = SampledStep(LateOutput({"a": 5}, waits, "only"))
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(step.get()))
    if first == "this thread":
        results.append(step.get())
    other.start()
    other.join()
    results.append(step.get())
    assert all(result.sampled_token_ids == [[5]] for result in results)
    assert waits == ["only"]
