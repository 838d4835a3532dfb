"""The reference sampler: from a logits row to a token id, on plain float32 NumPy, one row at a time.

The order is vLLM's. `adjusted` applies `allowed_token_ids`, `bad_words`, the tokens that `min_tokens` forbids,
`logit_bias`, penalties and the grammar's mask. `sample_row` applies temperature, min-p, top-k, top-p and the noise of
services.worker.sampling.noise. A row's result depends on its own logits, tokens and parameters only.

The lowest id of several maxima is sampled. Tokens that tie with the last token kept are kept. If the grammar allows no
token that the other parameters allow, the lowest id that the grammar allows is sampled; if the other parameters allow
no token and there is no grammar, id 0 is sampled. Log-probabilities come from the model's own logits.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.columns import F32, I32
from protocol.sampling import BadWords, SamplingParams
from services.worker.sampling.noise import gumbel

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
NEVER = np.float32(-np.inf)


def sample(logits: F32, params: SamplingParams, prompt: I32, output: I32, mask: I32 | None = None) -> int:
    """Return the token that follows `prompt` and `output` (int32 ids).

    Args:
        logits: float32[vocab] of the model; not changed.
        mask: int32[ceil(vocab / 32)] of the grammar; None: no grammar.
    """
    p, row = params, adjusted(logits, params, prompt, output, mask)
    return sample_row(row, p.temperature, p.min_p, p.top_k, p.top_p, p.seed, len(prompt) + len(output))


# -- changes to the logits ---------------------------------------------------------------------------------------


def adjusted(logits: F32, params: SamplingParams, prompt: I32, output: I32, mask: I32 | None = None) -> F32:
    """Return a changed copy of `logits`, minus infinity at forbidden tokens. Arguments as for `sample`."""
    row = logits.copy()
    if params.allowed_token_ids:
        allow_only(row, np.frombuffer(params.allowed_token_ids, np.int32))
    forbid(row, ends_of_bad_words(params.bad_words, output))
    if len(output) < params.min_tokens:
        forbid(row, params.eos_token_ids + params.stop_token_ids)
    add_bias(row, params.logit_bias)
    if params.penalizes:
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        penalize(row, prompt, output, *penalties)
    if mask is not None:
        apply_bitmask(row, mask)
    return row


def allow_only(logits: F32, token_ids: I32) -> None:
    """Forbid all other tokens, in place. Ids outside the vocabulary are ignored, here and below."""
    allowed = np.zeros(len(logits), np.bool_)
    allowed[token_ids[token_ids < len(logits)]] = True
    logits[~allowed] = NEVER


def forbid(logits: F32, token_ids: tuple[int, ...]) -> None:
    """Set the tokens to minus infinity, in place."""
    logits[[token for token in token_ids if token < len(logits)]] = NEVER


def ends_of_bad_words(bad_words: BadWords, output: I32) -> tuple[int, ...]:
    """Return the last token of each bad word whose other tokens are the end of the output."""
    end = tuple(output[-max(map(len, bad_words)) :].tolist()) if bad_words else ()
    return tuple(word[-1] for word in bad_words if len(word) == 1 or end[-(len(word) - 1) :] == word[:-1])


def add_bias(logits: F32, biases: tuple[tuple[int, float], ...]) -> None:
    """Add to each (token, bias), in place."""
    for token, bias in biases:
        if token < len(logits):
            logits[token] += np.float32(bias)


def penalize(logits: F32, prompt: I32, output: I32, repetition: float, frequency: float, presence: float) -> None:
    """Apply, in place, the repetition penalty to tokens of prompt and output, then frequency and presence penalties to
    tokens of the output."""
    emitted, counts = np.unique(output, return_counts=True)
    seen, factor = np.union1d(prompt, emitted), np.float32(repetition)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    logits[emitted] -= np.float32(frequency) * counts.astype(np.float32)
    logits[emitted] -= np.float32(presence)


def apply_bitmask(logits: F32, mask: I32) -> None:
    """Forbid, in place, tokens whose bit is not set (least significant bit first). At least one token stays allowed."""
    allowed = allowed_by(mask, len(logits))
    logits[~allowed] = NEVER
    if allowed.any() and logits.max() == NEVER:
        logits[allowed.argmax()] = 0


def allowed_by(mask: I32, vocab_size: int) -> NDArray[np.bool_]:
    """Return the mask's bits as bool[vocab]."""
    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


# -- the draw ----------------------------------------------------------------------------------------------------


def sample_row(
    logits: F32, temperature: float, min_p: float, top_k: int, top_p: float, seed: int, position: int
) -> int:
    """Return the token id of one row.

    Args:
        logits: float32[vocab] with minus infinity at forbidden tokens.
        position: index of the sampled token in its request.
    """
    if temperature < GREEDY_BELOW:
        return int(logits.argmax())
    kept = restrict(logits / np.float32(temperature), top_k, top_p, min_p)
    left = np.flatnonzero(kept > NEVER)
    if not len(left):
        return 0
    noise = gumbel(np.array([seed], np.uint64), np.array([position], np.uint32), left)[0]
    return int(left[(kept[left] + noise).argmax()])


def restrict(logits: F32, top_k: int, top_p: float, min_p: float) -> F32:
    """Return logits in which the tokens that min-p, top-k or top-p exclude are minus infinity."""
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
    """Log-probabilities at one position, as in a row of `protocol.logprobs.Logprobs`."""

    token_rank: int
    """Place of the token in the order of likelihood; 1 is the most likely."""
    token_ids: I32
    """int32[1 + count]: the token itself, then the most likely ones; among equal ones the lowest id first."""
    values: F32
    """float32[1 + count], natural logarithms."""


def logprobs_of(logits: F32, token: int, count: int) -> TokenLogprobs:
    """Return the log-probabilities of `token` and `count` alternatives, at most as many as there are tokens.

    Args:
        logits: float32[vocab] of the model.
    """
    ids = np.concatenate(([token], most_likely(logits, count))).astype(np.int32)
    return TokenLogprobs(1 + int((logits > logits[token]).sum()), ids, log_softmax(logits)[ids])


def most_likely(logits: F32, count: int) -> I32:
    """Return int32[count] ids, or fewer in a smaller vocabulary: the greatest first, among equal ones the lowest id."""
    count = min(count, len(logits))
    if not count:
        return np.empty(0, np.int32)
    least = np.partition(logits, -count)[-count]
    among = np.flatnonzero(logits >= least)
    return among[np.argsort(-logits[among], kind="stable")[:count]].astype(np.int32)


def log_softmax(logits: F32) -> F32:
    """Return float32[vocab], natural logarithms. The sum is made in float64, so its order hardly matters."""
    shifted = logits - logits.max()
    return shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
