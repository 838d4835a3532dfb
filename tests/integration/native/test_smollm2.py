"""The default model: tokens in float32, and perplexity in both dtypes, of `transformers` on the dequantised weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from protocol.sampling import SamplingParams
from services.checkpoint import read_text
from services.checkpoint.default_model import packaged_model
from services.worker.weights.conversion import convert
from tests.integration.native.conftest import Family
from tests.integration.native.driver import RunnerDriver

MODEL = packaged_model()
pytestmark = pytest.mark.skipif(MODEL is None, reason="deploy/model.txt is not installed")
TOKENS = 12
PROMPTS = [
    "The capital of France is", "def fibonacci(n):", "Once upon a time", "In 1969, humans", "SELECT name FROM",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "2 + 2 =", "La capitale de la France est",
    "A haiku about rain:", "1, 2, 3, 4,",
]  # fmt: skip
PROSE = Path(__file__).parents[2] / "benchmarks" / "prose_and_code.txt"

ROUNDING = 0.02
"""Logits may differ by this much: the products of quantised weights round activations. The logits' deviation is 7."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    assert MODEL is not None
    return Tokenizer.from_str(read_text(MODEL, "tokenizer.json") or "")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Family]:
    """The converted checkpoint in `transformers`."""
    assert MODEL is not None
    path = tmp_path_factory.mktemp("converted") / "smollm2"
    convert(MODEL, path, "float32")
    yield Family(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), path)
    for file in path.iterdir():  # 0.5 GB
        file.unlink()


@pytest.fixture(scope="module")
def driver() -> RunnerDriver:
    assert MODEL is not None
    return RunnerDriver(MODEL, dtype="float32", threads=2)


@torch.no_grad()
def test_greedy_tokens(reference: Family, driver: RunnerDriver, tokenizer: Tokenizer) -> None:
    for batch in (PROMPTS[:5], PROMPTS[5:]):
        requests = [driver.add(tokenizer.encode(text).ids) for text in batch]
        driver.generate(requests, TOKENS)
        for request in requests:
            assert regret(reference, request.prompt, request.output) < ROUNDING
            driver.finish(request)


def regret(reference: Family, prompt: list[int], output: list[int]) -> float:
    """Return by how much the best logit exceeds that of a token of `output`, at most. If it is 0, greedy decoding gives
    the same tokens."""
    logits = reference.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    return float((logits.amax(-1) - chosen).max())


@pytest.fixture(scope="module")
def served_driver() -> RunnerDriver:
    """In the dtype in which it is served, with the products that this processor has for it."""
    assert MODEL is not None
    return RunnerDriver(MODEL, dtype="bfloat16", threads=2)


@torch.no_grad()
def test_perplexity_of_a_text(
    reference: Family, tokenizer: Tokenizer, driver: RunnerDriver, served_driver: RunnerDriver
) -> None:
    ids = tokenizer.encode(PROSE.read_text(encoding="utf-8")).ids[:320]
    logits = reference.model(torch.tensor([ids])).logits[0, :-1].float()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).exp().item()
    assert 2 < expected < 100
    for each, tolerance in ((driver, 0.005), (served_driver, 0.01)):
        scored = each.add(ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        each.generate([scored], 1)
        scores = [scored.scores[position].values[0] for position in range(1, len(ids))]
        assert torch.tensor(scores).mean().neg().exp().item() == pytest.approx(expected, rel=tolerance)
