"""The model that is served when none is named: transformers' answers, bit-equal however its requests meet."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from tests.integration.native.conftest import Family
from tests.integration.native.driver import RunnerDriver

TEXTS = ["How do I read a file line by line?", "import asyncio\n\nasync def main():", "The heapq module", "x"]
TOKENS = 24


@pytest.fixture(scope="module")
def demo() -> Family:
    return Family(AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval(), DEMO_MODEL)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def test_answers_equal_transformers(demo: Family, prompts: list[list[int]]) -> None:
    driver = RunnerDriver(DEMO_MODEL, block_size=16)
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, TOKENS, chunk=7)
    for request in requests:
        expected, logits = demo.reference(request.prompt, TOKENS, request.output)
        top = logits.topk(2).values
        close = (top[:, 0] - top[:, 1] < 1e-4).tolist()  # from there on, either answer is right
        decided = close.index(True) if any(close) else TOKENS
        assert decided > 10
        assert request.output[:decided] == expected[:decided]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_crowd_changes_no_token(prompts: list[list[int]], temperature: float) -> None:
    driver = RunnerDriver(DEMO_MODEL, block_size=16)
    params = [SamplingParams(1000, temperature, top_p=0.95, seed=seed) for seed in range(8)]
    alone = [driver.add(prompts[i % 4], p) for i, p in enumerate(params)]
    for request in alone:
        driver.generate([request], TOKENS)
    crowd = [driver.add(prompts[i % 4], p) for i, p in enumerate(params)]
    driver.generate(crowd, TOKENS, chunk=5)
    assert [r.output for r in crowd] == [r.output for r in alone]
    assert len({tuple(r.output) for r in crowd}) == (4 if temperature == 0 else 8)
