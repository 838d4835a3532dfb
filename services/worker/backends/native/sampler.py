"""From logits to token ids, all rows at once; a row's result depends on its own logits and parameters only.

The order is vLLM's: what may not be sampled, temperature, min-p, top-k, top-p, then the noise. Tokens that tie with the
last one kept are kept too. Of equal maxima the lowest id wins.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.steps import GrammarOutput
from services.worker.backends.native.noise import gumbel
from services.worker.batch import SlotTable

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
CANDIDATES = 1024
"""Tokens that are sorted first; the whole vocabulary only where these do not reach top-p."""
NEVER = float("-inf")


def sample(
    logits: torch.Tensor, table: SlotTable, slots: NDArray[np.int32], positions: NDArray[np.int32]
) -> torch.Tensor:
    """int64[rows] sampled ids.

    Args:
        logits: float32[rows, vocab], changed in place
        slots: the slot of each row, where its parameters are
        positions: the absolute position that each sampled token will have
    """
    _ban(logits, table, slots, positions)
    ids = logits.argmax(-1)
    random = np.flatnonzero(table.temperature[slots] >= GREEDY_BELOW)
    if len(random):
        rows = torch.from_numpy(random)
        chosen = slots[random]
        kept = _filter(logits[rows] / _column(table.temperature[chosen]), table, chosen)
        kept += gumbel(table.seed[chosen], positions[random], logits.shape[1], logits.device)
        ids[rows] = kept.argmax(-1)
    return ids


def apply_grammar(logits: torch.Tensor, slots: NDArray[np.int32], grammar: GrammarOutput) -> None:
    """Leaves the rows of constrained slots only the tokens whose bit is set."""
    words = np.frombuffer(grammar.bitmask, np.int32).reshape(-1, -(-logits.shape[1] // 32))
    row_of = {slot: row for row, slot in enumerate(slots.tolist())}
    for slot, mask in zip(np.frombuffer(grammar.slots, np.int32).tolist(), words, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[1]]
        if slot in row_of:
            logits[row_of[slot]].masked_fill_(torch.from_numpy(allowed == 0), NEVER)


def _ban(
    logits: torch.Tensor, table: SlotTable, slots: NDArray[np.int32], positions: NDArray[np.int32]
) -> None:
    """min_tokens: a text that is still too short cannot end."""
    for row in np.flatnonzero(positions < table.banned_until[slots]).tolist():
        ids = [token for token in table.banned[slots[row]] if token < logits.shape[1]]
        logits[row, ids] = NEVER


def _column(values: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values)[:, None]


def _filter(logits: torch.Tensor, table: SlotTable, slots: NDArray[np.int32]) -> torch.Tensor:
    """Sets what min-p, top-k and top-p exclude to minus infinity."""
    min_p, top_k, top_p = table.min_p[slots], table.top_k[slots], table.top_p[slots]
    if min_p.any():
        cutoff = logits.amax(-1, keepdim=True) + torch.log(_column(min_p))
        logits = logits.masked_fill(logits < cutoff, NEVER)
    limited = np.flatnonzero((top_k > 0) | (top_p < 1))
    if len(limited):
        rows = torch.from_numpy(limited)
        part = logits[rows]
        k = np.where(top_k[limited] > 0, top_k[limited], part.shape[1])
        logits[rows] = part.masked_fill(part < _cutoffs(part, k, top_p[limited]), NEVER)
    return logits


def _cutoffs(logits: torch.Tensor, top_k: NDArray[np.int32], top_p: NDArray[np.float32]) -> torch.Tensor:
    """float32[rows, 1]: the smallest logit that stays."""
    vocab = logits.shape[1]
    k = torch.from_numpy(np.clip(top_k, 1, vocab).astype(np.int64))[:, None]
    size = min(vocab, CANDIDATES)
    cutoff, reached = _cutoffs_among(logits.topk(size).values, logits, k, top_p)
    missing = (~reached).nonzero()[:, 0]
    if len(missing):
        ordered = logits[missing].sort(descending=True).values
        cutoff[missing] = _cutoffs_among(ordered, logits[missing], k[missing], top_p[missing.numpy()])[0]
    return cutoff


def _cutoffs_among(
    ordered: torch.Tensor, logits: torch.Tensor, k: torch.Tensor, top_p: NDArray[np.float32]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cutoffs float32[rows, 1] as far as the largest logits `ordered` tell, and bool[rows] whether they do."""
    size, vocab = ordered.shape[1], logits.shape[1]
    within = torch.arange(size) < k
    exponents = torch.exp(ordered - ordered[:, :1]) * within
    everything = torch.exp(logits - ordered[:, :1]).sum(-1, keepdim=True)
    sums = exponents.double().cumsum(-1)
    total = torch.where(k < vocab, sums[:, -1:], everything.double())
    before = (sums - exponents) / total
    share = _column(np.where(top_p < 1, top_p, np.float32(2))).double()
    keep = (within & (before < share)).sum(-1, keepdim=True).clamp(min=1)
    reached = (k <= size) | ((k == vocab) & (keep < size)) | (size == vocab)
    return ordered.gather(-1, keep - 1), reached[:, 0]
