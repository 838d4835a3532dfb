"""Every parameter: tokens and log-probabilities equal those of vLLM's `LLM.generate`, with drafts and without."""

import importlib
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.codec import unpack
from protocol.membership import Speculation
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from tests.vllm.driver import CONTEXT, VllmRun, VllmStream, VllmWorker
from tests.vllm.parameter_cases import DRAFTS, PARAMETER_CASES, all_streams
from tests.vllm.preloaded import processes
from tests.vllm.reference import VllmAnswers, VllmRequest, generate

NAMES = [name for name, (_, grammar) in PARAMETER_CASES.items() if grammar is None]
"""Cases without a grammar: vLLM has no grammar like the one of these tests."""


def streams() -> dict[str, VllmStream]:
    return {name: s for name, s in zip(PARAMETER_CASES, all_streams(), strict=True) if name in NAMES}


def vllm_request(stream: VllmStream) -> VllmRequest:
    """Return the request for vLLM; what is not set keeps vLLM's own default."""
    params = {
        name: getattr(stream.params, name)
        for name, default in zip(SamplingParams.__struct_fields__[1:], SamplingParams.__struct_defaults__, strict=True)
        if getattr(stream.params, name) != default
    }  # fmt: skip
    set_afterwards: dict[str, Any] = {}
    if words := params.pop("bad_words", None):
        set_afterwards["_bad_words_token_ids"] = [list(word) for word in words]
    if biases := params.pop("logit_bias", None):
        params["logit_bias"] = dict(biases)
    if allowed := params.pop("allowed_token_ids", None):
        params["allowed_token_ids"] = unpack(allowed).tolist()
    if stops := params.pop("stop_token_ids", None):
        params["stop_token_ids"] = list(stops)
    # The streams have no end tokens
    params |= {"max_tokens": stream.params.max_tokens, "ignore_eos": True}
    return VllmRequest(stream.prompt, params, set_afterwards)


class ParameterAnswers(msgspec.Struct):
    tokens: dict[str, list[int]]
    scores: dict[str, dict[int, tuple[int, list[int], list[float]]]]
    accepted: int


def answer(speculation: Speculation | None) -> ParameterAnswers:
    """Answer all requests together, at depth three. Needs a new process, because it creates vLLM."""
    importlib.import_module("numba")  # as some of vLLM's processors do, before its worker starts
    with VllmRun(VllmWorker(speculation), 3) as run:
        requests = streams()
        run.serve(*requests.values())
        accepted = run.core.stats().get("spec_decode_num_accepted_tokens", 0)
    tokens = {name: stream.tokens for name, stream in requests.items()}
    return ParameterAnswers(tokens, {name: stream.scores for name, stream in requests.items()}, int(accepted))


class Comparison(msgspec.Struct):
    plain: ParameterAnswers
    drafting: ParameterAnswers
    reference: VllmAnswers


@pytest.fixture(scope="module")
def both() -> Comparison:
    requests = [vllm_request(stream) for stream in streams().values()]
    with processes() as pool:
        running = [pool.submit(answer, speculation) for speculation in (None, DRAFTS)]
        reference = pool.submit(generate, str(DEMO_MODEL), [requests], max_model_len=CONTEXT)
        plain, drafting = (future.result() for future in running)
        return Comparison(plain, drafting, reference.result())


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_vllms(name: str, both: Comparison) -> None:
    expected = both.reference.tokens[0][NAMES.index(name)]
    assert both.plain.tokens[name] == expected
    assert both.drafting.tokens[name] == expected, "with drafts, sampled requests too"
    assert both.drafting.accepted > 0


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("kind", ["plain", "drafting"])
def test_log_probabilities_equal_vllms(name: str, kind: str, both: Comparison) -> None:
    """Ids and token ranks are equal; values differ by less than 1e-4. Both sum in float32, but batches and chunks have
    other shapes, so logits of about 20 differ by about 1e-5."""
    mine, expected = getattr(both, kind).scores[name], both.reference.scores[0][NAMES.index(name)]
    assert mine.keys() == expected.keys()
    for position, (rank, ids, values) in mine.items():
        wanted_rank, wanted = expected[position]
        assert (rank, set(ids)) == (wanted_rank, set(wanted)), position
        assert values == pytest.approx([wanted[token] for token in ids], abs=1e-4)
    spread = np.ptp([values[0] for _, _, values in mine.values()])
    assert spread > 0.1, "far more than the tolerance"
