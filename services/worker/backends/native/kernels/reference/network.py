"""The forward pass in plain torch over a paged cache."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn import functional

from services.worker.backends.native.kernels.interface.attention import Attention, AttentionShape
from services.worker.backends.native.kernels.interface.buffers import Buffers
from services.worker.backends.native.kernels.interface.kv_cache import (
    Allocate,
    CacheShape,
    KVCache,
    own_memory,
)
from services.worker.backends.native.kernels.interface.products import EmbeddingTable, Linear
from services.worker.backends.native.kernels.interface.recording import EagerRecording, Recording
from services.worker.backends.native.kernels.quantized_weight import QuantizedWeight, Weight

B = TypeVar("B", bound=Buffers)
T = TypeVar("T")


class ReferenceNetwork:
    """`NetworkKernels`"""

    def __init__(self, activations: torch.dtype) -> None:
        self.activations = activations

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        return ReferenceLinear(weight, bias, self.activations)

    def embedding(self, weight: Weight) -> EmbeddingTable:
        return ReferenceEmbedding(weight)

    def tied(self, embedding: EmbeddingTable) -> Linear:
        assert isinstance(embedding, ReferenceEmbedding), "it is one of this network's"
        return self.linear(embedding.weight)

    def bytes_per_block(self, shape: CacheShape) -> int:
        per_head = 2 * shape.block_size * shape.head_dim
        return shape.layers * shape.kv_heads * per_head * shape.dtype.itemsize

    def kv_cache(self, shape: CacheShape, num_blocks: int, allocate: Allocate = own_memory) -> KVCache:
        """keys[layer] and values[layer]: [blocks, block_size, kv_heads, head_dim]."""
        sizes = shape.layers, num_blocks, shape.block_size, shape.kv_heads, shape.head_dim
        keys, values = allocate(sizes, shape.dtype), allocate(sizes, shape.dtype)
        return KVCache(shape, num_blocks, keys, values)

    def attention(
        self, shape: AttentionShape, cache: KVCache, table: torch.Tensor, most_tokens: int
    ) -> Attention:
        return ReferenceAttention(shape, cache, table)

    def gather(self, index: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(source[index.long()])

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(source)

    def add(self, source: torch.Tensor, out: torch.Tensor) -> None:
        out.add_(source)

    def norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        if delta is not None:
            residual.add_(delta)
        out.copy_(_normalised(residual, weight, eps))

    def silu_and_multiply(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = gate_up.float().chunk(2, -1)
        out.copy_(functional.silu(gate) * up)

    def most_likely(
        self, logits: torch.Tensor, sharpness: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor
    ) -> None:
        ids.copy_(logits.argmax(-1))
        chances.copy_((logits * sharpness[:, None]).softmax(-1).amax(-1))

    def call(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        return function(x)

    def record(self, body: Callable[[B], T], buffers: B) -> Recording[T]:
        return EagerRecording(body, buffers)


class ReferenceLinear:
    """`Linear`"""

    def __init__(self, weight: Weight, bias: torch.Tensor | None, activations: torch.dtype) -> None:
        self._activations = activations
        self._weight = weight if isinstance(weight, QuantizedWeight) else weight.to(activations)
        self._bias = bias if bias is None else bias.to(activations)
        self.num_bytes = self._weight.nbytes

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        if isinstance(weight, QuantizedWeight):
            weight = weight.dequantized().to(self._activations)
        return out.copy_(functional.linear(x, weight, self._bias))


class ReferenceEmbedding:
    """`EmbeddingTable`"""

    def __init__(self, weight: Weight) -> None:
        self.weight, self.num_bytes = weight, weight.nbytes
        self.tensor = weight if isinstance(weight, torch.Tensor) else None

    def __len__(self) -> int:
        return self.weight.shape[0]

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        weight, rows = self.weight, index.long()
        out.copy_(weight.select(rows) if isinstance(weight, QuantizedWeight) else weight[rows])


class ReferenceAttention:
    """`Attention`"""

    def __init__(self, shape: AttentionShape, cache: KVCache, table: torch.Tensor) -> None:
        self._shape, self._cache, self._table = shape, cache, table

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        size = self._cache.shape.block_size
        self._angles = positions[:, None].float() * self._shape.frequencies
        self._blocks = self._table[slots.long(), positions.long() // size].long()
        self._offsets = positions.long() % size

    def write(
        self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        shape, kv_heads = self._shape, self._cache.shape.kv_heads
        heads = qkv.float().unflatten(-1, (-1, self._cache.shape.head_dim))
        queries, keys, values = heads.split([shape.heads, kv_heads, kv_heads], 1)
        if norms is not None:
            queries = _normalised(queries, norms[0], shape.norm_eps)
            keys = _normalised(keys, norms[1], shape.norm_eps)
        self._queries = self._rotated(queries)
        dtype = self._cache.shape.dtype
        self._cache.keys[layer, self._blocks, self._offsets] = self._rotated(keys).to(dtype)
        self._cache.values[layer, self._blocks, self._offsets] = values.to(dtype)

    def _rotated(self, heads: torch.Tensor) -> torch.Tensor:
        """float32[tokens, heads, head_dim]"""
        cos, sin = self._angles.cos()[:, None], self._angles.sin()[:, None]
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attend(self, layer: int, tiles: torch.Tensor, out: torch.Tensor) -> None:
        for slot, position, token, count in tiles.tolist():
            queries = self._queries[token : token + count]
            end = position + count
            keys, values = (self._positions(tensor[layer], slot, end) for tensor in self._kept)
            where = torch.arange(position, end)
            out[token : token + count] = self._attended(queries, keys, values, where, layer).flatten(1)

    @property
    def _kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys, self._cache.values

    def _positions(self, blocks: torch.Tensor, slot: int, end: int) -> torch.Tensor:
        """float32[heads, end, head_dim]: the first positions of a slot, each KV head as often as it has query heads."""
        number = -(-end // self._cache.shape.block_size)
        heads = blocks[self._table[slot, :number].long()].flatten(0, 1)[:end].float()
        return heads.repeat_interleave(self._shape.heads // self._cache.shape.kv_heads, 1).transpose(0, 1)

    def _attended(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        where: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """float32[tokens, heads, head_dim]; `where` are the queries' positions."""
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * self._cache.shape.head_dim**-0.5
        at, window = torch.arange(keys.shape[1]), self._shape.windows[layer]
        unseen = at > where[:, None]
        if window:
            unseen |= at <= where[:, None] - window
        return (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1)


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32, over the last dimension"""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
