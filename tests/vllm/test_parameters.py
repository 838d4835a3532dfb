"""Every parameter: tokens and log-probabilities are those of vLLM's own `LLM.generate`, with drafts and without."""

from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.codec import unpack
from protocol.membership import Speculation
from protocol.sampling import SamplingParams
from services.checkpoint import DEMO_MODEL
from tests.vllm.asked import ASKED, everything
from tests.vllm.driver import CONTEXT, Run, Stream, Worker
from tests.vllm.preloaded import processes
from tests.vllm.reference import Answers, Ask, answers

NAMES = [name for name, (_, grammar) in ASKED.items() if grammar is None]
"""vLLM has no grammar like the one of these tests."""
GREEDY = [name for name in NAMES if ASKED[name][0].temperature == 0.0]
REFUSED = ("logit_bias", "min_p")
"""vLLM itself does not serve them with drafts."""
DRAFTS = Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)


def streams() -> dict[str, Stream]:
    return {name: s for name, s in zip(ASKED, everything(), strict=True) if name in NAMES}


def ask(stream: Stream) -> Ask:
    """In vLLM's words; everything that is not asked for is vLLM's own default."""
    params = {
        name: getattr(stream.params, name)
        for name, default in zip(SamplingParams.__struct_fields__[1:], SamplingParams.__struct_defaults__, strict=True)
        if getattr(stream.params, name) != default
    }  # fmt: skip
    beyond: dict[str, Any] = {}
    if words := params.pop("bad_words", None):
        beyond["_bad_words_token_ids"] = [list(word) for word in words]
    if biases := params.pop("logit_bias", None):
        params["logit_bias"] = dict(biases)
    if allowed := params.pop("allowed_token_ids", None):
        params["allowed_token_ids"] = unpack(allowed).tolist()
    if stops := params.pop("stop_token_ids", None):
        params["stop_token_ids"] = list(stops)
    params |= {
        "max_tokens": stream.params.max_tokens,
        "ignore_eos": True,
    }  # ours names no tokens that end the text
    return Ask(stream.prompt, params, beyond)


class Ours(msgspec.Struct):
    tokens: dict[str, list[int]]
    scores: dict[str, dict[int, tuple[int, list[int], list[float]]]]
    accepted: int


def ours(speculation: Speculation | None) -> Ours:
    """All at once, two steps ahead. Takes a process of its own: vLLM is built in it."""
    with Run(Worker(speculation), 3) as run:
        asked = streams()
        run.serve(*asked.values())
        accepted = run.core.stats().get("spec_decode_num_accepted_tokens", 0)
    tokens = {name: stream.tokens for name, stream in asked.items()}
    return Ours(tokens, {name: stream.scores for name, stream in asked.items()}, int(accepted))


class Both(msgspec.Struct):
    plain: Ours
    drafting: Ours
    theirs: Answers
    theirs_drafting: Answers
    """The greedy ones that vLLM serves with drafts."""


@pytest.fixture(scope="module")
def both() -> Both:
    asked = {name: ask(stream) for name, stream in streams().items()}
    drafted = [asked[name] for name in GREEDY if name not in REFUSED]
    drafts = {
        "method": DRAFTS.method,
        "num_speculative_tokens": DRAFTS.num_speculative_tokens,
        "prompt_lookup_min": DRAFTS.prompt_lookup_min,
        "prompt_lookup_max": DRAFTS.prompt_lookup_max,
    }
    engine = {"max_model_len": CONTEXT}
    with processes() as pool:
        running = (
            pool.submit(ours, None),
            pool.submit(answers, str(DEMO_MODEL), [list(asked.values())], **engine),
            pool.submit(ours, DRAFTS),
            pool.submit(answers, str(DEMO_MODEL), [drafted], **engine, speculative_config=drafts),
        )
        plain, theirs, drafting, theirs_drafting = (future.result() for future in running)
    return Both(plain, drafting, theirs, theirs_drafting)


def test_each_says_something_else(both: Both) -> None:
    """So that what is compared below was asked for at all."""
    said = {name: tuple(tokens) for name, tokens in zip(NAMES, both.theirs.tokens[0], strict=True)}
    alike = {"logprobs", "prompt_logprobs"}
    assert len({said[name] for name in NAMES if name not in alike}) == len(NAMES) - len(alike)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_vllms(name: str, both: Both) -> None:
    expected = both.theirs.tokens[0][NAMES.index(name)]
    assert both.plain.tokens[name] == expected
    assert both.drafting.tokens[name] == expected, "with drafts, drawn ones too"


def test_vllm_with_drafts_says_the_same_to_greedy_requests(both: Both) -> None:
    served = [name for name in GREEDY if name not in REFUSED]
    for name, tokens in zip(served, both.theirs_drafting.tokens[0], strict=True):
        assert tokens == both.plain.tokens[name], name
    assert both.drafting.accepted > 0


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("kind", ["plain", "drafting"])
def test_log_probabilities_are_vllms(name: str, kind: str, both: Both) -> None:
    """The same ids and ranks. Values within 1e-4: both sum in float32, but in batches and chunks of other shapes, and
    logits of some 20 then differ by some 1e-5."""
    mine, expected = getattr(both, kind).scores[name], both.theirs.scores[0][NAMES.index(name)]
    assert mine.keys() == expected.keys()
    for position, (rank, ids, values) in mine.items():
        wanted_rank, wanted = expected[position]
        assert (rank, set(ids)) == (wanted_rank, set(wanted)), position
        assert values == pytest.approx([wanted[token] for token in ids], abs=1e-4)
    spread = np.ptp([values[0] for _, _, values in mine.values()])
    assert spread > 0.1, "far more than what is let pass"
