"""The forward pass in plain torch over a paged cache."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn import functional

from services.worker.kernels.interface.attention import Attention, AttentionShape
from services.worker.kernels.interface.buffers import Buffers
from services.worker.kernels.interface.kv_cache import Allocate, CacheShape, KVCache, own_memory
from services.worker.kernels.interface.network import Activation
from services.worker.kernels.interface.products import EmbeddingTable, Linear
from services.worker.kernels.interface.recording import EagerRecording, Recording
from services.worker.kernels.interface.routing import Routed, RoutingKernels
from services.worker.kernels.packed_weight import PLAIN, Packed
from services.worker.kernels.quantized_weight import QuantizedWeight, Weight

B = TypeVar("B", bound=Buffers)
T = TypeVar("T")


class ReferenceNetwork:
    """`NetworkKernels`"""

    def __init__(self, activations: torch.dtype) -> None:
        self.activations = activations
        self.routing: RoutingKernels | None = ReferenceRouting()

    def pack(self, weight: Weight, is_table: bool = False) -> Packed:
        return weight

    def linear(self, weight: Packed, bias: torch.Tensor | None = None) -> Linear:
        assert not isinstance(weight, tuple), PLAIN
        return ReferenceLinear(weight, bias, self.activations)

    def embedding(self, weight: Packed) -> EmbeddingTable:
        assert not isinstance(weight, tuple), PLAIN
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

    def copy(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        out.copy_(source * factor)

    def add(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        out.add_(source, alpha=factor)

    def norm(
        self,
        residual: torch.Tensor | None,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        factor: float = 1.0,
    ) -> None:
        if residual is None:
            assert delta is not None, "there is something to normalise"
            residual = delta.float()
        elif delta is not None:
            residual.add_(delta, alpha=factor)
        out.copy_(residual if weight is None else _normalised(residual, weight, eps))

    def gate_and_multiply(
        self, gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = "silu"
    ) -> None:
        gate, up = gate_up.float().chunk(2, -1)
        match activation:
            case "silu":
                out.copy_(functional.silu(gate) * up)
            case "gelu_tanh":
                out.copy_(functional.gelu(gate, approximate="tanh") * up)
            case "clamped_silu":
                gate = gate.clamp(max=7.0)
                out.copy_(gate * (1.702 * gate).sigmoid() * (up.clamp(-7.0, 7.0) + 1))

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


class ReferenceRouting:
    """`RoutingKernels`"""

    def route(self, logits: torch.Tensor, per_token: int, normalised: bool) -> Routed:
        chances, every = logits.float().softmax(-1), logits.shape[1]
        chosen = logits.float().sort(stable=True, dim=1, descending=True).indices[:, :per_token]
        weights = chances.gather(1, chosen)
        if normalised:
            weights = weights / weights.sum(1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ends = [0, *torch.bincount(chosen.flatten(), minlength=every).cumsum(0).tolist()]
        return Routed(order // per_token, weights.flatten()[order], ends)

    def combine(
        self, results: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, rows: int
    ) -> torch.Tensor:
        out = torch.zeros(rows, results.shape[1])
        return out.index_add_(0, tokens, results.float() * weights[:, None])


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
        self._shape, self._cache, self._tables = shape, cache, shape.tables_of(table)

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        size = self._cache.shape.block_size
        self._angles = [positions[:, None].float() * each for each in self._shape.frequencies]
        self._blocks = [table[slots.long(), positions.long() // size].long() for table in self._tables]
        self._offsets = positions.long() % size

    def write(
        self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        shape, kv_heads = self._shape, self._cache.shape.kv_heads
        heads = qkv.float().unflatten(-1, (-1, self._cache.shape.head_dim))
        queries, keys, values = heads.split([shape.heads, kv_heads, kv_heads], 1)
        if norms is not None:
            queries = _heads_normalised(queries, norms[0], shape.norm_eps)
            keys = _heads_normalised(keys, norms[1], shape.norm_eps)
        self._queries = self._rotated(queries, layer)
        dtype = self._cache.shape.dtype
        at = shape.place_of(layer), self._blocks[shape.table_of(layer)], self._offsets
        self._cache.keys[at] = self._rotated(keys, layer).to(dtype)
        self._cache.values[at] = values.to(dtype)

    def _rotated(self, heads: torch.Tensor, layer: int) -> torch.Tensor:
        """float32[tokens, heads, head_dim]"""
        number, amplitudes = self._shape.rotation_of(layer), self._shape.amplitudes
        factor = 1.0 if amplitudes is None else amplitudes[number]
        angles = self._angles[number]
        cos, sin = (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attend(
        self, layer: int, tiles: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        for slot, position, token, count in tiles.tolist():
            queries = self._queries[token : token + count]
            end, window = position + count, self._shape.windows[layer]
            low = max(0, position - window + 1) if window else 0  # memory behind the window is not the slot's
            table, place = self._tables[self._shape.table_of(layer)][slot], self._shape.place_of(layer)
            keys, values = (self._positions(tensor[place], table, low, end) for tensor in self._kept)
            where = torch.arange(position - low, end - low)
            attended = self._attended(queries, keys, values, where, layer, sinks)
            out[token : token + count] = attended.flatten(1)

    @property
    def _kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cache.keys, self._cache.values

    def _positions(self, blocks: torch.Tensor, table: torch.Tensor, low: int, end: int) -> torch.Tensor:
        """float32[heads, end - low, head_dim]: positions of a slot, each KV head as often as it has query heads."""
        size = self._cache.shape.block_size
        first, number = low // size, -(-end // size)
        heads = (
            blocks[table[first:number].long()].flatten(0, 1)[low - first * size : end - first * size].float()
        )
        return heads.repeat_interleave(self._shape.heads // self._cache.shape.kv_heads, 1).transpose(0, 1)

    def _attended(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        where: torch.Tensor,
        layer: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """float32[tokens, heads, head_dim]; `where` are the queries' positions, counted from the first key."""
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * self._shape.score_factor
        at, window = torch.arange(keys.shape[1]), self._shape.windows[layer]
        unseen = at > where[:, None]
        if window:
            unseen |= at <= where[:, None] - window
        scores = scores.masked_fill(unseen, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(where), 1)), -1)
        return (scores.softmax(-1)[..., : len(at)] @ values).transpose(0, 1)


def _heads_normalised(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32[tokens, heads, head_dim]; head by head, or over all heads if there is a weight for each."""
    if len(weight) == heads.shape[2]:
        return _normalised(heads, weight, eps)
    return _normalised(heads.flatten(1), weight, eps).view(heads.shape)


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32, over the last dimension"""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
