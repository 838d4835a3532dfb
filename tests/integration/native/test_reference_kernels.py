"""A whole model served with the reference kernels: the tokens of the compiled ones, with every parameter and drafts."""

from collections.abc import Callable

import pytest
import torch

from protocol.membership import Speculation
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GREEDY, DrivenRequest, RunnerDriver

TOKENS = 16
PARAMS = [
    GREEDY,
    SamplingParams(1000, 0.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.7, logprobs=2),
    SamplingParams(1000, 0.0, bad_words=((7,), (9, 3)), logit_bias=((5, 3.0),), prompt_logprobs=1),
    SamplingParams(1000, 0.8, top_p=0.9, top_k=40, min_p=0.01, seed=6),
]


def served(driver: RunnerDriver, chunk: int = 7) -> list[DrivenRequest]:
    requests = [driver.add(list(range(20 + 3 * i, 45 + i)), params) for i, params in enumerate(PARAMS)]
    driver.generate(requests, TOKENS, chunk, depth=2)
    return requests


@pytest.mark.parametrize("name", ["llama-untied-biased", "mistral-window", "qwen3-seven-groups"])
def test_equal_tokens_and_close_logits(make_family: Callable[[str], Family], name: str) -> None:
    compiled, reference = (RunnerDriver(make_family(name).path, kernels=k) for k in ("compiled", "reference"))
    theirs, ours = served(compiled), served(reference)
    for one, other in zip(ours, theirs, strict=True):
        assert one.output == other.output, one.params
        assert one.scores.keys() == other.scores.keys()
        for at, score in one.scores.items():
            assert score.ids == other.scores[at].ids
            assert score.values == pytest.approx(other.scores[at].values, abs=1e-4)
    torch.testing.assert_close(torch.cat(reference.logits), torch.cat(compiled.logits), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["ngram", "eagle", "draft_model"])
def test_drafts_change_no_token(method: str) -> None:
    """The demo model has an EAGLE head of its own."""
    draft_model = str(DEMO_MODEL) if method == "draft_model" else ""
    answers = {}
    wanted = Speculation(method, 3, draft_model, prompt_lookup_min=1, prompt_lookup_max=4)
    for speculation in (None, wanted):
        options = {"block_size": 16, "dtype": "float32", "kernels": "reference", "speculation": speculation}
        driver = RunnerDriver(DEMO_MODEL, **options)
        repeating = SamplingParams(1000, 0.0, logit_bias=((3, 100.0),))
        requests = [driver.add([5, 9, 300], repeating), driver.add(list(range(300, 330)))]
        driver.generate(requests, TOKENS, chunk=20)
        answers[method if speculation else "plain"] = [request.output[:TOKENS] for request in requests]
        if speculation is not None:
            assert sum(request.drafted for request in requests) > 0
    assert len({str(answer) for answer in answers.values()}) == 1
