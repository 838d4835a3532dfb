"""Sampling with compiled kernels."""

import numpy as np
import torch

from protocol.columns import I32
from services.worker.kernels.cpu.compiled.choosing import choose_kernel
from services.worker.kernels.cpu.compiled.logit_rules import mask_kernel
from services.worker.kernels.cpu.compiled.logprobs import logprobs_kernel
from services.worker.kernels.cpu.logit_rules import CpuLogitRules
from services.worker.kernels.interface.logit_rules import LogitRules
from services.worker.kernels.interface.sampling import DrawColumns, SamplingKernels, ScoredTokens
from services.worker.sampling.noise import keys
from services.worker.sampling.reference import GREEDY_BELOW


class CpuSampling(SamplingKernels):
    """For one calling thread."""

    def __init__(self) -> None:
        self._greedy, self._draw = choose_kernel(cost=4), choose_kernel(cost=1)
        self._mask, self._logprobs = mask_kernel(), logprobs_kernel()

    def logit_rules(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> LogitRules:
        return CpuLogitRules(num_slots, vocab_size, history)

    def apply_bitmask(self, logits: torch.Tensor, rows: I32, words: I32) -> None:
        addresses = rows.ctypes.data, words.ctypes.data
        self._mask.run(len(rows), (logits.data_ptr(), logits.shape[1], *addresses))

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        ids = torch.empty(len(logits), dtype=torch.int32)
        self._greedy.run(len(logits), (logits.data_ptr(), logits.shape[1], *(0,) * 6, ids.data_ptr()))
        return ids

    def choose(self, logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        if (columns.temperature < GREEDY_BELOW).all():
            return self.greedy(logits)
        ids = torch.empty(len(logits), dtype=torch.int32)
        *filters, seed, position = columns
        drawn = *filters, *keys(seed, position)
        addresses = (column.ctypes.data for column in drawn)
        self._draw.run(len(logits), (logits.data_ptr(), logits.shape[1], *addresses, ids.data_ptr()))
        return ids

    def logprobs(self, logits: torch.Tensor, rows: I32, tokens: torch.Tensor, tops: I32) -> ScoredTokens:
        vocab_size = logits.shape[1]
        counts = tops + np.int32(1)
        firsts = np.cumsum(counts, dtype=np.int32) - counts
        entries = int(counts.sum())
        ids, values = np.empty(entries, np.int32), np.empty(entries, np.float32)
        token_ranks = np.empty(len(rows), np.int32)
        columns = rows, tokens.numpy(), tops, firsts, ids, values, token_ranks
        addresses = (column.ctypes.data for column in columns)
        self._logprobs.run(len(rows), (logits.data_ptr(), vocab_size, *addresses, entries))
        return ScoredTokens(counts, *map(torch.from_numpy, (ids, values, token_ranks)))
