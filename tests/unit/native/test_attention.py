"""Paged attention of every implementation against torch's own attention on contiguous keys and values."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from services.worker.backends.native.kernels.interface.attention import AttentionShape
from services.worker.backends.native.kernels.interface.kv_cache import CacheShape
from services.worker.backends.native.kernels.interface.rows import BatchTensors
from services.worker.batch.slots import Rows
from tests.unit.native.implementations import BF16, F32, every_implementation, make

CONTEXT = 50
SLOTS = 3


@dataclass
class AttentionCase:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0
    normed: bool = False
    """Queries and keys are normalised head by head."""


SHAPES = [
    AttentionCase(4, 2, 64, 16),
    AttentionCase(4, 4, 24, 5),
    AttentionCase(6, 2, 80, 16, window=17),
    AttentionCase(7, 1, 8, 3, window=7, normed=True),
    AttentionCase(2, 1, 128, 32, window=1),
    AttentionCase(3, 3, 16, 1, normed=True),
]
KINDS = [(F32, F32), (F32, BF16), (BF16, BF16)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_kind = pytest.mark.parametrize("kinds", KINDS, ids=str)


class AttentionSetup:
    """Random tokens of `SLOTS` sequences, and a cache whose unwritten memory is poisoned."""

    def __init__(
        self, implementation: str, shape: AttentionCase, activations: torch.dtype, cache: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        self.shape, self.activations = shape, activations
        self.kernels = make(implementation, cache, activations)
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = torch.randn(SLOTS, CONTEXT, width).to(activations)
        blocks = -(-CONTEXT // shape.block_size)
        total = SLOTS * blocks + 2
        self.table = torch.randperm(total, dtype=torch.int32)[: SLOTS * blocks].view(SLOTS, blocks)
        network = self.kernels.network
        sizes = CacheShape(1, shape.kv_heads, shape.head_dim, shape.block_size, cache)
        self.cache = network.kv_cache(sizes, total)
        self.cache.keys.fill_(float("nan"))
        self.cache.values.fill_(float("nan"))
        exponents = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        frequencies = 1e4**-exponents
        self.angles = torch.arange(CONTEXT)[:, None] * frequencies
        norms = (torch.rand(shape.head_dim) + 0.5, torch.rand(shape.head_dim) + 0.5)
        self.norms = norms if shape.normed else None
        described = AttentionShape(shape.heads, shape.head_dim, (shape.window,), 1e-6, frequencies)
        self.attention = network.attention(described, self.cache, self.table, SLOTS * CONTEXT)

    def run(self, starts: list[int], counts: list[int]) -> list[torch.Tensor]:
        """The outputs [count, heads * head_dim] of the next tokens of each sequence; a count of 0 is no row."""
        slots = np.flatnonzero(counts).astype(np.int32)
        here = [np.array(column, np.int32)[slots] for column in (starts, counts)]
        samples, drafts = np.ones(len(slots), np.bool_), np.zeros(len(slots), np.int32)
        rows = Rows(slots, slots, *here, samples, drafts)
        tokens = sum(counts)
        ints = [torch.empty(tokens, dtype=torch.int32) for _ in range(3)]
        batch = BatchTensors(*ints, torch.empty(tokens, 4, dtype=torch.int32), torch.empty_like(ints[0]))
        tiles, _ = self.kernels.rows.lay_out(rows, None, 1, batch)
        qkv = torch.cat([self.qkv[i, s : s + n] for i, (s, n) in enumerate(zip(starts, counts, strict=True))])
        out = torch.full(
            (tokens, self.shape.heads * self.shape.head_dim), float("nan"), dtype=self.activations
        )
        self.attention.begin(batch.positions, batch.slots)
        self.attention.write(0, qkv, self.norms)
        self.attention.attend(0, batch.tiles[:tiles], out)
        return list(out.split(counts))

    def expected(self) -> torch.Tensor:
        """[sequences, context, heads * head_dim]"""
        shape = self.shape
        heads = self.qkv.float().view(SLOTS, CONTEXT, -1, shape.head_dim).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        if self.norms is not None:
            q, k = (
                F.rms_norm(x, (shape.head_dim,), w, 1e-6) for x, w in zip((q, k), self.norms, strict=True)
            )
        query, key = torch.arange(CONTEXT)[:, None], torch.arange(CONTEXT)
        mask = (key <= query) & (key > query - (shape.window or CONTEXT))
        out = F.scaled_dot_product_attention(
            self.rotated(q), self.rotated(k), v, attn_mask=mask, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (torch.cat([f(self.angles)] * 2, -1) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


@every_implementation
@each_shape
@each_kind
def test_equals_contiguous_attention(
    implementation: str, shape: AttentionCase, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    setup = AttentionSetup(implementation, shape, *kinds)
    outputs = setup.run([0] * SLOTS, [CONTEXT] * SLOTS)
    tolerance = 2e-6 if kinds[1] == F32 else 0.05
    torch.testing.assert_close(torch.stack(outputs).float(), setup.expected(), atol=tolerance, rtol=0)


@each_shape
@each_kind
def test_chunks_change_no_bit(shape: AttentionCase, kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """With compiled kernels; chunks end at block boundaries and inside of blocks, and some steps lack a row."""
    outputs = AttentionSetup("compiled", shape, *kinds).run([0] * SLOTS, [CONTEXT] * SLOTS)
    pieces = AttentionSetup("compiled", shape, *kinds)
    seen: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
    starts = [0] * SLOTS
    for number, counts in enumerate(
        [[1, 20, 7], [13, 1, 9], [9, 0, 20], [0, 28, 0], [10, 0, 1], [17, 1, 13]]
    ):
        assert max(np.add(starts, counts)) <= CONTEXT, number
        for slot, part in enumerate(pieces.run(starts, counts)):
            seen[slot].append(part)
        starts = np.add(starts, counts).tolist()
    assert starts == [CONTEXT] * SLOTS
    for slot in range(SLOTS):
        assert torch.equal(torch.cat(seen[slot]), outputs[slot])


@every_implementation
def test_a_step_of_one_token(implementation: str) -> None:
    shape = SHAPES[0]
    setup = AttentionSetup(implementation, shape, F32, F32)
    setup.run([0, 0, 0], [0, CONTEXT - 1, 0])
    (_, last, _) = setup.run([0, CONTEXT - 1, 0], [0, 1, 0])
    torch.testing.assert_close(last[0], setup.expected()[1, -1], atol=2e-6, rtol=0)
