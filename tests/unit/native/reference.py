"""Sampling parameters on one row, in plain float32: what the native kernels must equal bit for bit."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from protocol.sampling import SamplingParams

F32 = NDArray[np.float32]


def changed(
    logits: F32, params: SamplingParams, prompt: list[int], output: list[int], allowed: set[int] | None = None
) -> F32:
    """What is left of a row before temperature; `allowed`: by a grammar."""
    row, vocab = logits.copy(), len(logits)
    if params.allowed_token_ids:
        ids = [i for i in np.frombuffer(params.allowed_token_ids, np.int32).tolist() if i < vocab]
        row[[i for i in range(vocab) if i not in ids]] = -np.inf
    for *before, last in params.bad_words:
        if last < vocab and output[len(output) - len(before) :] == before and len(before) <= len(output):
            row[last] = -np.inf
    if len(output) < params.min_tokens:
        row[[i for i in params.eos_token_ids + params.stop_token_ids if i < vocab]] = -np.inf
    for token, bias in params.logit_bias:
        if token < vocab:
            row[token] += np.float32(bias)
    repetition = np.float32(params.repetition_penalty)
    for token in {*prompt, *output}:
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token, count in Counter(output).items():
        row[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        row[token] -= np.float32(params.presence_penalty)
    if allowed is not None:
        row[[i for i in range(vocab) if i not in allowed]] = -np.inf
        if not np.isfinite(row).any():
            row[min(allowed)] = 0
    return row
