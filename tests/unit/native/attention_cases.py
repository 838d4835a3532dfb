"""Paged attention of some implementation over random tokens, for tests that compare its outputs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.batch.slots import Rows
from services.worker.kernels.interface.attention import Attention, AttentionShape
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.interface.kv_cache import CacheShape, KVCache
from services.worker.kernels.interface.rows import BatchTensors

SLOTS = 3
AttentionMaker = Callable[[AttentionShape, KVCache, torch.Tensor, int], Attention]
"""As `NetworkKernels.attention`."""


@dataclass(frozen=True)
class AttentionCase:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0
    normed: bool = False
    """Queries and keys are normalised head by head."""
    all_heads: bool = False
    """They are normalised over all heads of a token."""
    sinks: bool = False
    """Each head has a sink, and sines and cosines have an amplitude of 1.25."""
    turns: bool = True
    """False: the layer has no positions."""


class PagedTokens:
    """Random tokens of `SLOTS` sequences, and a cache whose unwritten memory is poisoned.

    There are two layers; attention is computed in the second one, whose window is the case's.
    """

    def __init__(
        self,
        kernels: Kernels,
        case: AttentionCase,
        context: int,
        activations: torch.dtype,
        cache: torch.dtype,
        make: AttentionMaker | None = None,
    ) -> None:
        """
        Args:
            context: tokens of each sequence
            make: None: the kernels' own
        """
        torch.manual_seed(0)
        self.kernels, self.case, self.context, self.activations = kernels, case, context, activations
        width = (case.heads + 2 * case.kv_heads) * case.head_dim
        self.qkv = torch.randn(SLOTS, context, width).to(activations)
        blocks = -(-context // case.block_size)
        total = SLOTS * blocks + 2
        table = torch.randperm(total, dtype=torch.int32)[: SLOTS * blocks].view(SLOTS, blocks)
        number = (case.heads, case.kv_heads) if case.all_heads else (1, 1)
        queries, keys = (torch.rand(heads * case.head_dim) + 0.5 for heads in number)
        self.norms = (queries, keys) if case.normed or case.all_heads else None
        self.sinks = torch.randn(case.heads) * 3 if case.sinks else None
        sizes = CacheShape(2, case.kv_heads, case.head_dim, case.block_size, cache)
        self.cache = kernels.network.kv_cache(sizes, total)
        self.cache.keys.fill_(float("nan"))
        self.cache.values.fill_(float("nan"))
        self.frequencies = 1e4 ** -(torch.arange(0, case.head_dim, 2) / case.head_dim)
        frequencies = torch.stack((self.frequencies, torch.zeros_like(self.frequencies)))
        amplitudes = torch.tensor([1.25 if case.sinks else 1.0, 1.0])[:, None].expand_as(frequencies).contiguous()
        shape = AttentionShape(
            *(case.heads, case.head_dim, (0, case.window), 1e-6, frequencies, amplitudes),
            *((0, 0 if case.turns else 1), case.head_dim**-0.5, 1, (0, 0), (0, 1)),
        )
        if not case.turns:
            self.frequencies = frequencies[1]
        make = make or kernels.network.attention
        self._attention = make(shape, self.cache, table, SLOTS * context)

    def step(self, starts: list[int], counts: list[int], padding: int = 0) -> torch.Tensor:
        """Return [tokens, heads * head_dim] of the next tokens of each sequence; a count of 0 is no row.

        Args:
            padding: more rows that compute nothing
        """
        slots = np.flatnonzero(counts).astype(np.int32)
        here = [np.array(column, np.int32)[slots] for column in (starts, counts)]
        rows = Rows(slots, slots, *here, np.ones(len(slots), np.bool_), np.zeros(len(slots), np.int32))
        tokens = sum(counts)
        ints = [torch.empty(tokens + padding, dtype=torch.int32) for _ in range(4)]
        tiles = torch.empty(tokens + padding, 4, dtype=torch.int32)
        batch = BatchTensors(*ints[:3], tiles, ints[3])
        number, _ = self.kernels.rows.lay_out(rows, None, 1, batch)
        parts = [self.qkv[slot, start : start + n] for slot, start, n in zip(slots, *here, strict=True)]
        qkv = torch.cat((*parts, torch.randn(padding, self.qkv.shape[2]).to(self.activations)))
        width = self.case.heads * self.case.head_dim
        out = torch.full((tokens + padding, width), float("nan"), dtype=self.activations)
        self._attention.begin(batch.positions, batch.slots)
        self._attention.write(1, qkv, self.norms)
        self._attention.attend(1, tiles[: number + padding], out, self.sinks)
        return out[:tokens]
