"""The paged attention kernels against torch's own attention on contiguous keys and values."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from services.worker.backends.native.batch import Batch
from services.worker.backends.native.kernels.attention import attention_kernel, write_kernel
from services.worker.backends.native.kv_cache import padded
from services.worker.batch.slots import Rows

CONTEXT = 50
SLOTS = 3


@dataclass
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int = 0


SHAPES = [
    Shape(4, 2, 64, 16),
    Shape(4, 4, 24, 5),
    Shape(6, 2, 80, 16, window=17),
    Shape(7, 1, 8, 3, window=7),
    Shape(2, 1, 128, 32, window=1),
    Shape(3, 3, 16, 1),
]
KINDS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]


class World:
    """Random tokens of `SLOTS` sequences, and a cache whose unwritten memory is poisoned."""

    def __init__(self, shape: Shape, activations: torch.dtype, cache: torch.dtype) -> None:
        torch.manual_seed(0)
        self.shape, self.activations = shape, activations
        self.width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = torch.randn(SLOTS, CONTEXT, self.width).to(activations)
        blocks = -(-CONTEXT // shape.block_size)
        self.table = torch.randperm(SLOTS * blocks + 2, dtype=torch.int32)[: SLOTS * blocks].view(
            SLOTS, blocks
        )
        dim, lanes, total = padded(shape.head_dim), padded(shape.block_size), SLOTS * blocks + 2
        self.keys = torch.full((total, shape.kv_heads, dim, lanes), float("nan"), dtype=cache)
        self.values = torch.full((total, shape.kv_heads, shape.block_size, dim), float("nan"), dtype=cache)
        frequencies = 1e4 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        self.angles = torch.arange(CONTEXT)[:, None] * frequencies
        kinds = activations == torch.bfloat16, cache == torch.bfloat16
        self.write, self.attend = write_kernel(*kinds), attention_kernel(*kinds)

    def run(self, starts: list[int], counts: list[int]) -> list[torch.Tensor]:
        """The outputs [count, heads * head_dim] of the next tokens of each sequence."""
        shape, columns = (
            self.shape,
            [np.array(c, np.int32) for c in (range(SLOTS), range(SLOTS), starts, counts)],
        )
        batch = Batch.of(Rows(*columns, samples=np.ones(SLOTS, np.bool_), drafts=np.zeros(SLOTS, np.int32)))
        qkv = torch.cat([self.qkv[i, s : s + n] for i, (s, n) in enumerate(zip(starts, counts, strict=True))])
        angles = self.angles[batch.positions.long()]
        cos, sin = angles.cos(), angles.sin()
        dim, lanes = padded(shape.head_dim), padded(shape.block_size)
        queries = torch.full((len(qkv), shape.heads, dim), float("nan"))
        out = torch.full((len(qkv), shape.heads * shape.head_dim), float("nan"), dtype=self.activations)
        common = (
            *(self.keys.data_ptr(), self.values.data_ptr(), self.table.data_ptr(), self.table.shape[1]),
            *(shape.block_size, lanes, shape.heads, shape.kv_heads, shape.head_dim, dim, queries.data_ptr()),
        )
        where = (batch.slots.data_ptr(), batch.positions.data_ptr(), cos.data_ptr(), sin.data_ptr())
        scale = shape.head_dim**-0.5
        self.write.run(len(qkv), (*common, qkv.data_ptr(), *where, 0, 0, 1e-6, scale))
        scratch = 8 * shape.heads // shape.kv_heads * self.table.shape[1] * lanes
        tiles = (out.data_ptr(), batch.tiles.data_ptr(), shape.window, scratch)
        self.attend.run(batch.num_tiles * shape.kv_heads, (*common, *tiles))
        return list(out.split(counts))

    def reference(self) -> torch.Tensor:
        """[sequences, context, heads * head_dim]"""
        shape = self.shape
        heads = self.qkv.float().view(SLOTS, CONTEXT, -1, shape.head_dim).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        query, key = torch.arange(CONTEXT)[:, None], torch.arange(CONTEXT)
        mask = (key <= query) & (key > query - (shape.window or CONTEXT))
        out = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = (torch.cat([f(self.angles)] * 2, -1) for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_equals_contiguous_attention_and_chunks_change_no_bit(
    shape: Shape, kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    whole, pieces = World(shape, *kinds), World(shape, *kinds)
    outputs = whole.run([0] * SLOTS, [CONTEXT] * SLOTS)
    tolerance = 2e-6 if kinds[1] == torch.float32 else 0.05
    torch.testing.assert_close(torch.stack(outputs).float(), whole.reference(), atol=tolerance, rtol=0)
    seen: list[list[torch.Tensor]] = [[] for _ in range(SLOTS)]
    starts = [0] * SLOTS
    for number, counts in enumerate([[1, 20, 7], [13, 1, 9], [9, 12, 20], [10, 16, 1], [17, 1, 13]]):
        assert max(np.add(starts, counts)) <= CONTEXT, number
        for slot, part in enumerate(pieces.run(starts, counts)):
            seen[slot].append(part)
        starts = np.add(starts, counts).tolist()
    assert starts == [CONTEXT] * SLOTS
    for slot in range(SLOTS):
        assert torch.equal(torch.cat(seen[slot]), outputs[slot])
