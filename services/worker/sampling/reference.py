"""The reference sampler: from a logits row to a token id, on plain float32 NumPy, one row at a time.

The order is vLLM's: `allowed_token_ids`, `bad_words`, the tokens that `min_tokens` forbids, `logit_bias`, penalties,
the grammar's mask (all these are `shaped`), then temperature, min-p, top-k, top-p and the noise of
services.worker.sampling.noise (`sample_row`). A row's result depends on its own logits, tokens and parameters only.

Of equal maxima the lowest id wins; tokens that tie with the last one kept are kept. A grammar that leaves nothing of
what the other parameters allow wins over them: the lowest id that it allows is taken. Where they leave nothing without
a grammar, it is id 0. Log-probabilities are those of the row as the model gave it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import BadWords, SamplingParams
from services.worker.sampling.noise import gumbel

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
NEVER = np.float32(-np.inf)


@dataclass(frozen=True)
class RowParams:
    """What one row asks of the draw."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    position: int
    """The index that the sampled token will have in its request."""

    @classmethod
    def of(cls, params: SamplingParams, position: int) -> "RowParams":
        p = params
        return cls(p.temperature, p.top_p, p.top_k, p.min_p, p.seed, position)


def sample(logits: F32, params: SamplingParams, prompt: I32, output: I32, mask: I32 | None = None) -> int:
    """The token that follows `prompt` and `output` (int32 ids), by the model's own row.

    Args:
        logits: float32[vocab], left as it is
        mask: int32[ceil(vocab / 32)], the grammar's
    """
    row = shaped(logits, params, prompt, output, mask)
    return sample_row(row, RowParams.of(params, len(prompt) + len(output)))


# -- what changes the row ----------------------------------------------------------------------------------------


def shaped(logits: F32, params: SamplingParams, prompt: I32, output: I32, mask: I32 | None = None) -> F32:
    """A new row, minus infinity where a token is forbidden; arguments as for `sample`."""
    row = logits.copy()
    if params.allowed_token_ids:
        allow_only(row, np.frombuffer(params.allowed_token_ids, np.int32))
    forbid(row, ends_of_bad_words(params.bad_words, output))
    if len(output) < params.min_tokens:
        forbid(row, params.eos_token_ids + params.stop_token_ids)
    add_bias(row, params.logit_bias)
    if params.penalizes:
        penalize(row, params, prompt, output)
    if mask is not None:
        apply_bitmask(row, mask)
    return row


def allow_only(logits: F32, token_ids: I32) -> None:
    """In place; ids outside the vocabulary are nobody's, here and below."""
    allowed = np.zeros(len(logits), np.bool_)
    allowed[token_ids[token_ids < len(logits)]] = True
    logits[~allowed] = NEVER


def forbid(logits: F32, token_ids: tuple[int, ...]) -> None:
    """In place."""
    logits[[token for token in token_ids if token < len(logits)]] = NEVER


def ends_of_bad_words(bad_words: BadWords, output: I32) -> tuple[int, ...]:
    """The last token of each bad word whose other tokens the output ends with."""
    said = tuple(output[-max(map(len, bad_words)) :].tolist()) if bad_words else ()
    return tuple(word[-1] for word in bad_words if len(word) == 1 or said[-(len(word) - 1) :] == word[:-1])


def add_bias(logits: F32, biases: tuple[tuple[int, float], ...]) -> None:
    """In place."""
    for token, bias in biases:
        if token < len(logits):
            logits[token] += np.float32(bias)


def penalize(logits: F32, params: SamplingParams, prompt: I32, output: I32) -> None:
    """In place: repetition for what stands in prompt or output, then frequency, then presence for the output."""
    said, counts = np.unique(output, return_counts=True)
    seen, repetition = np.union1d(prompt, said), np.float32(params.repetition_penalty)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
    logits[said] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
    logits[said] -= np.float32(params.presence_penalty)


def apply_bitmask(logits: F32, mask: I32) -> None:
    """In place: only tokens whose bit is set stay (least significant bit first). Of those at least one does."""
    allowed = allowed_by(mask, len(logits))
    logits[~allowed] = NEVER
    if allowed.any() and logits.max() == NEVER:
        logits[allowed.argmax()] = 0


def allowed_by(mask: I32, vocab_size: int) -> NDArray[np.bool_]:
    """bool[vocab]"""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


# -- the draw ----------------------------------------------------------------------------------------------------


def sample_row(logits: F32, params: RowParams) -> int:
    """The token id of one row; `logits` float32[vocab] with minus infinity where a token is forbidden."""
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    kept = restrict(logits / np.float32(params.temperature), params.top_k, params.top_p, params.min_p)
    left = np.flatnonzero(kept > NEVER)
    if not len(left):
        return 0
    seed, position = np.array([params.seed], np.uint64), np.array([params.position], np.uint32)
    return int(left[(kept[left] + gumbel(seed, position, left)[0]).argmax()])


def restrict(logits: F32, top_k: int, top_p: float, min_p: float) -> F32:
    """A row in which min-p, top-k and top-p have set what they exclude to minus infinity."""
    top = logits.max()
    if top == NEVER:
        return logits
    if min_p > 0:
        logits = np.where(logits < top + np.log(np.float32(min_p)), NEVER, logits)
    if not top_k and top_p >= 1:
        return logits
    ordered = np.sort(logits)[::-1][: top_k or None]
    weights = np.exp(ordered - top, dtype=np.float64)
    sums = np.cumsum(weights)
    keep = max(1, int((sums - weights < top_p * sums[-1]).sum()))
    return np.where(logits < ordered[keep - 1], NEVER, logits)


# -- log-probabilities -------------------------------------------------------------------------------------------


class TokenLogprobs(NamedTuple):
    """Of one token: its rank (1 is the most likely) and the entries of a row of `protocol.logprobs.Logprobs`."""

    rank: int
    token_ids: I32
    """int32[1 + count]: the token itself, then the most likely ones; of equal ones the lowest id first."""
    values: F32


def logprobs_of(logits: F32, token: int, count: int) -> TokenLogprobs:
    """By the model's own row, float32[vocab]; `count` alternatives, no more than there are tokens."""
    ids = np.concatenate(([token], most_likely(logits, count))).astype(np.int32)
    return TokenLogprobs(1 + int((logits > logits[token]).sum()), ids, log_softmax(logits)[ids])


def most_likely(logits: F32, count: int) -> I32:
    """int32[count] at most: ids of the greatest, the greatest first, of equal ones the lowest first."""
    count = min(count, len(logits))
    if not count:
        return np.empty(0, np.int32)
    least = np.partition(logits, -count)[-count]
    among = np.flatnonzero(logits >= least)
    return among[np.argsort(-logits[among], kind="stable")[:count]].astype(np.int32)


def log_softmax(logits: F32) -> F32:
    """float32[vocab], natural logarithms; summed in float64, so that it hardly matters in which order."""
    shifted = logits - logits.max()
    return shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
