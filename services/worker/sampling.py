"""The reference sampler: from logits rows to token ids, on NumPy, one row at a time.

The order is vLLM's: what may not be sampled, temperature, min-p, top-k, top-p, then the noise (services.worker.noise).
Of equal maxima the lowest id wins; tokens that tie with the last one kept are kept. A row's result depends on its own
logits and parameters only.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.noise import gumbel

F32 = NDArray[np.float32]
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
NEVER = np.float32(-np.inf)


@dataclass(frozen=True)
class RowParams:
    """What one sampled row asks for."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    position: int
    """The index that the sampled token will have in its request."""


def sample_row(logits: F32, params: RowParams) -> int:
    """The token id of one row; `logits` float32[vocab] with minus infinity where a token is forbidden."""
    if params.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    kept = restrict(logits / np.float32(params.temperature), params.top_k, params.top_p, params.min_p)
    seed, position = np.array([params.seed], np.uint64), np.array([params.position], np.uint32)
    return int((kept + gumbel(seed, position, np.arange(len(kept)))[0]).argmax())


def restrict(logits: F32, top_k: int, top_p: float, min_p: float) -> F32:
    """A row in which min-p, top-k and top-p have set what they exclude to minus infinity."""
    if min_p > 0:
        cutoff = logits.max() + np.log(np.float32(min_p))
        logits = np.where(logits < cutoff, NEVER, logits)
    if not top_k and top_p >= 1:
        return logits
    ordered = np.sort(logits)[::-1][: top_k or None]
    weights = np.exp(ordered - ordered[0], dtype=np.float64)
    before = np.cumsum(weights) - weights
    keep = max(1, int((before < top_p * weights.sum()).sum()))
    return np.where(logits < ordered[keep - 1], NEVER, logits)


def forbid(logits: F32, token_ids: tuple[int, ...]) -> None:
    """In place; ids outside the vocabulary are nobody's."""
    logits[[token for token in token_ids if token < len(logits)]] = NEVER


def apply_bitmask(logits: F32, mask: NDArray[np.int32]) -> None:
    """In place: only tokens whose bit is set stay (least significant bit first)."""
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
    logits[allowed == 0] = NEVER
