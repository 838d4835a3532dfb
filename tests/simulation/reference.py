"""The simulated model, and the required answer to a request: pure functions without blocks, batch and scheduler.

A token is a function of the hash of the prefix before it, and of the seed for sampled requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from protocol.requests import FinishReason
from protocol.sampling import Pooling, SamplingParams
from services.worker.sampling import reference as sampling
from services.worker.sampling.reference import TokenLogprobs, logprobs_of
from tests.simulation.grammar import Automaton
from tests.simulation.hashing import ROOT, extend, words

HIDDEN_SIZE = 3
_MASK = (1 << 64) - 1
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def sample(prefix: int, params: SamplingParams, vocab: int) -> int:
    """Return the token after a prefix; greedy requests do not depend on the seed."""
    noise = prefix if params.temperature == 0 else extend(prefix, params.seed)
    return ((noise * 0xFF51AFD7ED558CCD & _MASK) >> 33) % vocab


def logits(prefix: int, vocab: int) -> NDArray[np.float32]:
    """Return float32[vocab] from -4 to 4 in few steps, so that there are ties, and one greater value: the token of
    greedy `sample`."""
    row = ((words(prefix, vocab) >> np.uint64(58)).astype(np.float32) - 32) / 8
    row[sample(prefix, _GREEDY, vocab)] = 5
    return row


def choose(
    prefix: int,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    vocab: int,
    mask: NDArray[np.int32] | None = None,
) -> int:
    """Return the token after a prefix; with the reference sampler if a parameter changes the row."""
    edits = params.logit_bias or params.bad_words or params.allowed_token_ids
    if mask is None and not (edits or params.penalizes):
        return sample(prefix, params, vocab)
    return _sampled(prefix, params, tuple(prompt), tuple(output), vocab, b"" if mask is None else mask.tobytes())


@lru_cache(1 << 13)
def _sampled(
    prefix: int, params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...], vocab: int, mask: bytes
) -> int:
    before, after = np.array(prompt, np.int32), np.array(output, np.int32)
    bits = np.frombuffer(mask, np.int32) if mask else None
    return sampling.sample(logits(prefix, vocab), params, before, after, bits)


@lru_cache(1 << 13)
def scores_of(prefix: int, token: int, vocab: int, count: int) -> TokenLogprobs:
    """Return the log-probabilities of a token after a prefix, and of `count` alternatives."""
    return logprobs_of(logits(prefix, vocab), token, count)


def hidden(prefix: int) -> NDArray[np.float64]:
    """Return float64[HIDDEN_SIZE] in steps of 2**-16: sums are exact in any order."""
    return (words(prefix, HIDDEN_SIZE) >> np.uint64(48)).astype(np.float64) * 2.0**-16


@dataclass(frozen=True)
class ExpectedAnswer:
    """The required answer of a request, at any depth and in any batch."""

    tokens: list[int]
    """All output tokens, including those delivered before a replay."""
    reason: FinishReason
    """ERROR: the grammar failed."""
    stop_reason: int | None
    scores: dict[int, TokenLogprobs]
    """Position -> requested log-probabilities, including those of tokens that came with a replay."""
    embedding: bytes = b""


def reference(
    prompt: list[int],
    params: SamplingParams,
    max_model_len: int,
    vocab: int,
    grammar: Automaton | None = None,
    pooling: Pooling = Pooling.NONE,
    seen: Sequence[int] | None = None,
) -> ExpectedAnswer:
    """Return the answer as a pure function of the request: no blocks, no batch, no scheduler.

    Args:
        seen: the prompt as the layers see it, with the contents of its images; None: it has none.
    """
    scores: dict[int, TokenLogprobs] = {}
    prefix, total = ROOT, np.zeros(HIDDEN_SIZE)
    for position, token in enumerate(prompt):
        if position and params.prompt_logprobs is not None:
            scores[position] = scores_of(prefix, token, vocab, params.prompt_logprobs)
        prefix = extend(prefix, token if seen is None else seen[position])
        total += hidden(prefix) if pooling is Pooling.MEAN else 0
    if pooling is not Pooling.NONE:
        vector = total / len(prompt) if pooling is Pooling.MEAN else hidden(prefix)
        return ExpectedAnswer([], FinishReason.STOP, None, scores, vector.astype(np.float32).tobytes())
    tokens: list[int] = []
    while True:
        token = choose(prefix, params, prompt, tokens, vocab, None if grammar is None else grammar.mask())
        if params.logprobs is not None:
            position = len(prompt) + len(tokens)
            scores[position] = scores_of(prefix, token, vocab, params.logprobs)
        if grammar is not None and not grammar.accept(token):
            return ExpectedAnswer(tokens, FinishReason.ERROR, None, scores)
        tokens.append(token)
        if grammar is not None or len(tokens) >= params.min_tokens:
            if token in params.eos_token_ids:
                return ExpectedAnswer(tokens, FinishReason.STOP, None, scores)
            if token in params.stop_token_ids:
                return ExpectedAnswer(tokens, FinishReason.STOP, token, scores)
        if len(tokens) >= params.max_tokens or len(prompt) + len(tokens) >= max_model_len:
            return ExpectedAnswer(tokens, FinishReason.LENGTH, None, scores)
        prefix = extend(prefix, token)
