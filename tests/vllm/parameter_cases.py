"""Requests with each parameter, and the comparison of two answers."""

from collections.abc import Iterable

import msgspec
import pytest

from protocol.codec import pack
from protocol.membership import Speculation
from protocol.sampling import SamplingParams, StructuredOutputParams
from tests.simulation.grammar import structured
from tests.vllm.driver import VllmStream

DEPTHS = (1, 2, 3)
each_depth = pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.soak), 3])
"""The tests of all cells run at depth two per change, too."""
FEW_BLOCKS = 14
"""Number of blocks that four of the longer requests fill."""
DRAFTS = Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=3)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=11)


def prompt_of(number: int, length: int = 0) -> list[int]:
    return [(number * 37 + i * 11) % 4000 for i in range(length or 5 + 21 * number)]


GRAMMAR = structured(5)
PARAMETER_CASES: dict[str, tuple[SamplingParams, StructuredOutputParams | None]] = {
    name: (msgspec.structs.replace(base, **changes), grammar)
    for name, base, changes, grammar in (
        ("greedy", GREEDY, {}, None),
        ("sampled", SAMPLED, {}, None),
        ("another seed", SAMPLED, {"seed": 2**64 - 1}, None),
        ("temperature", SAMPLED, {"temperature": 2.0}, None),
        ("top_k", SAMPLED, {"temperature": 2.0, "top_k": 2}, None),
        ("top_p", SAMPLED, {"temperature": 2.0, "top_p": 0.2}, None),
        ("min_p", SAMPLED, {"temperature": 2.0, "min_p": 0.3}, None),
        ("presence_penalty", GREEDY, {"presence_penalty": 2.0}, None),
        ("frequency_penalty", GREEDY, {"frequency_penalty": 2.0}, None),
        ("repetition_penalty", GREEDY, {"repetition_penalty": 2.0}, None),
        ("logit_bias", GREEDY, {"logit_bias": ((77, 100.0), (78, 100.0))}, None),
        ("bad_words", GREEDY, {"bad_words": ((19,), (204, 204), (292, 271), (271,))}, None),
        ("allowed_token_ids", GREEDY, {"allowed_token_ids": pack(range(100, 200))}, None),
        ("min_tokens", GREEDY, {"min_tokens": 12, "stop_token_ids": tuple(range(16, 1024))}, None),
        ("logprobs", GREEDY, {"logprobs": 3}, None),
        ("prompt_logprobs", SAMPLED, {"prompt_logprobs": 2, "logprobs": 0}, None),
        ("grammar", GREEDY, {}, GRAMMAR),
        ("grammar, sampled, penalties", SAMPLED, {"repetition_penalty": 1.5, "logprobs": 1}, GRAMMAR),
    )
}


def all_streams() -> list[VllmStream]:
    """Return a request for each case, with prompts of one chunk and of several."""
    return [
        VllmStream(prompt_of(number % 9, 40 + 17 * (number % 6)), params, grammar)
        for number, (params, grammar) in enumerate(PARAMETER_CASES.values())
    ]


def assert_equal(got: VllmStream, expected: VllmStream) -> None:
    assert got.tokens == expected.tokens
    assert got.finish.reason == expected.finish.reason
    assert got.scores.keys() == expected.scores.keys()
    for position, (rank, ids, values) in got.scores.items():
        wanted = expected.scores[position]
        assert (rank, ids) == wanted[:2], position
        assert values == pytest.approx(wanted[2], abs=1e-4)


def assert_all_equal(got: Iterable[VllmStream], expected: Iterable[VllmStream]) -> None:
    for mine, wanted in zip(got, expected, strict=True):
        assert_equal(mine, wanted)
