"""Sampling that stays on the device: no operation waits for a result."""

import numpy as np
import torch
import triton

from protocol.columns import F32, I32
from services.worker.batch.slots import spread
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cuda.compiled.choosing import best_kernel, cutoff_kernel
from services.worker.kernels.cuda.compiled.logit_rules import mask_kernel
from services.worker.kernels.cuda.logit_rules import CudaLogitRules
from services.worker.kernels.interface.logit_rules import LogitRules
from services.worker.kernels.interface.sampling import DrawColumns, SamplingKernels, ScoredTokens
from services.worker.sampling.noise import keys
from services.worker.sampling.reference import GREEDY_BELOW

_AT_ONCE, _ROW_AT_ONCE = 1024, 4096
"""Logits that a program reads at once: one of several for a row, and one for a whole row."""
_MOST_PARTS = 32
"""Programs that share a row."""
_ROWS_SCORED = 64
"""Rows whose log-probabilities are computed at once, which bounds the memory that this takes."""
_SCORED_BYTES = 20
"""Most memory for one logit of them: a copy, its bits, and the number that is sorted, twice for a moment."""


class CudaSampling(SamplingKernels):
    def __init__(self, device: ComputeDevice) -> None:
        self._device = device
        self._arrived = torch.zeros(0, dtype=torch.int32, device=device.where)
        """See `best_kernel`."""

    def logit_rules(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> LogitRules:
        return CudaLogitRules(num_slots, vocab_size, history, self._device)

    def apply_bitmask(self, logits: torch.Tensor, rows: I32, words: I32) -> None:
        if len(rows):
            which, masks = self._device.upload(rows, np.ascontiguousarray(words))
            sizes = logits.shape[1], words.shape[1]
            mask_kernel[(len(rows),)](logits, which, masks, *sizes, keeps_one=True, at_once=_AT_ONCE)

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return self._best(logits, None)[0]

    def choose(self, logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        if (columns.temperature < GREEDY_BELOW).all():
            return self.greedy(logits)
        key0, key1 = (key.view(np.int32) for key in keys(columns.seed, columns.position))
        filters = _log_min_p(columns.min_p), columns.top_k, columns.top_p
        filtered = (columns.min_p > 0) | (columns.top_k > 0) | (columns.top_p < 1)
        wanted = filters if filtered.any() else (np.full(len(logits), -np.inf, np.float32),)
        temperature, *drawn = self._device.upload(columns.temperature, key0, key1, *wanted)
        noise, (cutoff, *limits) = drawn[:2], drawn[2:]
        if limits:
            cutoff = self._cutoff(logits, temperature, cutoff, *limits)
        return self._best(logits, (temperature, cutoff, *noise))[0]

    def _best(self, logits: torch.Tensor, draw: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best token of each row, int32[rows], and the best logit or draw of each of its parts,
        float32[rows, parts].

        Args:
            draw: temperature, cutoff and the two keys of each row
        """
        rows, vocab = logits.shape
        parts, span = _parts(vocab)
        if rows > len(self._arrived):
            self._arrived = torch.zeros(rows, dtype=torch.int32, device=logits.device)
        best = torch.empty(rows, parts, device=logits.device)
        ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
        part_ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
        columns = draw if draw is not None else (best, best, ids, ids)
        if rows:
            # Fused products and sums would change the noise, which is the same on every backend.
            best_kernel[rows, parts](
                *(logits, *columns, best, part_ids, ids, self._arrived, vocab, span, parts),
                padded=triton.next_power_of_2(parts),
                draws=draw is not None,
                at_once=_AT_ONCE,
                enable_fp_fusion=False,
            )
        return ids, best

    def _cutoff(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        log_min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
    ) -> torch.Tensor:
        """Return the least scaled logit of each row that min-p, top-k and top-p keep, float32[rows]."""
        rows, vocab = logits.shape
        _, best = self._best(logits, None)
        parts = best.shape[1]
        cutoff = torch.empty(rows, device=logits.device)
        cutoff_kernel[(rows,)](
            *(logits, best, temperature, log_min_p, top_k, top_p, cutoff, vocab, parts),
            padded=triton.next_power_of_2(parts),
            at_once=_ROW_AT_ONCE,
            num_warps=16,
        )
        return cutoff

    def logprobs(self, logits: torch.Tensor, rows: I32, tokens: torch.Tensor, tops: I32) -> ScoredTokens:
        parts = [
            self._scored(logits, rows[part], tokens[part], tops[part])
            for part in (slice(first, first + _ROWS_SCORED) for first in range(0, len(rows), _ROWS_SCORED))
        ]
        if len(parts) == 1:
            return parts[0]
        counts, *tensors = zip(*parts, strict=True)
        return ScoredTokens(np.concatenate(counts), *map(torch.cat, tensors))

    def _scored(self, logits: torch.Tensor, rows: I32, tokens: torch.Tensor, tops: I32) -> ScoredTokens:
        counts, most = tops + np.int32(1), int(tops.max(initial=0))
        owners, offsets = spread(counts)
        chosen, entries = self._device.upload(rows.astype(np.int64), owners * (1 + most) + offsets)
        scored = logits.index_select(0, chosen)
        own = scored.gather(1, tokens.long()[:, None])
        ranks = (scored > own).sum(1, dtype=torch.int32) + 1
        greatest = scored.amax(1, keepdim=True)
        log_sum = (scored - greatest).exp_().sum(1, keepdim=True).log_()
        ids = torch.cat((tokens.long()[:, None], _most_likely(scored, most)), 1)
        values = (scored.gather(1, ids) - greatest) - log_sum
        ids, values = (each.reshape(-1).index_select(0, entries) for each in (ids, values))
        return ScoredTokens(counts, ids.int(), values, ranks)


def _parts(vocab: int) -> tuple[int, int]:
    """Return the number of programs that share a row, and the tokens of each."""
    parts = min(_MOST_PARTS, triton.cdiv(vocab, _AT_ONCE))
    return parts, triton.cdiv(triton.cdiv(vocab, parts), _AT_ONCE) * _AT_ONCE


def sampling_bytes(rows: int, vocab_size: int) -> int:
    """Return the most memory that choosing and scoring a token of each of `rows` rows takes."""
    masks = 2 * 4 * -(-vocab_size // 32)  # of a grammar and of allowed tokens
    # Of each part of the vocabulary; the row's greatest, cutoff, token and rank
    best = 8 * _MOST_PARTS + 4 * 4
    return rows * (masks + 2 * best) + _SCORED_BYTES * min(rows, _ROWS_SCORED) * vocab_size


def _log_min_p(min_p: F32) -> F32:
    """float32[rows], minus infinity where there is no filter."""
    logs = np.full(len(min_p), -np.inf, np.float32)
    np.log(min_p, out=logs, where=min_p > 0)
    return logs


def _most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64[rows, count]: the greatest first, the lowest id first among equals.

    Logit and id are one number each, so that no two are equal: the bits of the logit, in the order of their values,
    above the id.
    """
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # minus zero becomes zero
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    behind = torch.arange(vocab - 1, -1, -1, device=logits.device)
    greatest = ordered.bitwise_left_shift_(32).add_(behind).topk(count, dim=1).values
    return vocab - 1 - (greatest & 0xFFFFFFFF)
