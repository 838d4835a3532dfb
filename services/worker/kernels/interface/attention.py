"""Attention of a step."""

from typing import NamedTuple

import torch
from torch.nn import functional

from services.worker.kernels.interface.kv_cache import KVCache


class AttentionShape(NamedTuple):
    """Attention of every layer of a model."""

    heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Number of keys that a query reads in each layer, its own included; 0: all."""
    norm_eps: float
    frequencies: torch.Tensor
    """float32[rotations, head_dim / 2]: frequencies of the rotary position embedding, radians per position."""
    amplitudes: torch.Tensor
    """float32[rotations, head_dim / 2]: factors of sines and cosines."""
    rotations: tuple[int, ...]
    """The rotation of each layer."""
    scale: float
    """Factor of the scores."""
    num_tables: int
    """Block tables of a slot, side by side and equally wide."""
    tables: tuple[int, ...]
    """The block table of each layer."""
    places: tuple[int, ...]
    """Index of each layer in the cache."""


class Attention:
    """Rotary positions, writes to the cache and attention, layer after layer of one step."""

    def __init__(self, shape: AttentionShape, cache: KVCache, table: torch.Tensor) -> None:
        self._shape, self._cache, self._tables = shape, cache, table.chunk(shape.num_tables, 1)
        """Each table is a view int32[slots, blocks]."""

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Prepare data that the layers of a step share, from the tokens' positions and slots, int32[tokens] each."""
        size = self._cache.shape.block_size
        self._angles = [positions[:, None].float() * each for each in self._shape.frequencies]
        self._blocks = [table[slots.long(), positions.long() // size].long() for table in self._tables]
        self._offsets = positions.long() % size

    def write(self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Rotate queries and keys; write keys and values to the cache, before any query reads (write before read).

        Args:
            qkv: activations[tokens, (heads + 2 * kv_heads) * head_dim]
            norms: weights that normalise queries and keys first: float32[head_dim] each, head by head; or
                float32[heads * head_dim] and float32[kv_heads * head_dim], over all heads of a token
        """
        shape, kv_heads = self._shape, self._cache.shape.kv_heads
        heads = qkv.float().unflatten(-1, (-1, self._cache.shape.head_dim))
        queries, keys, values = heads.split([shape.heads, kv_heads, kv_heads], 1)
        if norms is not None:
            queries = _heads_normalised(queries, norms[0], shape.norm_eps)
            keys = _heads_normalised(keys, norms[1], shape.norm_eps)
        self._queries = self._rotated(queries, layer)
        dtype = self._cache.shape.dtype
        at = shape.places[layer], self._blocks[shape.tables[layer]], self._offsets
        self._cache.keys[at] = self._rotated(keys, layer).to(dtype)
        self._cache.values[at] = values.to(dtype)

    def _rotated(self, heads: torch.Tensor, layer: int) -> torch.Tensor:
        """float32[tokens, heads, head_dim]"""
        number = self._shape.rotations[layer]
        angles, factor = self._angles[number], self._shape.amplitudes[number]
        cos, sin = (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]
        first, second = heads.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attend(self, layer: int, tiles: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        """Compute the attention of the queries that were written last.

        Args:
            tiles: int32[tiles, 4]: slot, first position, first token, tokens
            out: activations[tokens, heads * head_dim]
            sinks: float32[heads]: one more score of each head in the softmax, without a value
        """
        for slot, position, token, count in tiles.tolist():
            queries = self._queries[token : token + count].transpose(0, 1)
            end, window = position + count, self._shape.windows[layer]
            low = max(0, position - window + 1) if window else 0  # memory behind the window is not the slot's
            table, place = self._tables[self._shape.tables[layer]][slot], self._shape.places[layer]
            kept = self._cache.keys, self._cache.values
            keys, values = (self._read(tensor[place], table, low, end) for tensor in kept)
            at, where = torch.arange(low, end), torch.arange(position, end)[:, None]
            seen = (at <= where) & (at > where - window) if window else at <= where
            bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            if sinks is not None:  # the scores of one more key
                bias = torch.cat((bias.expand(len(sinks), -1, -1), sinks[:, None, None].expand(-1, count, 1)), -1)
                keys, values = (functional.pad(each, (0, 0, 0, 1)) for each in (keys, values))
            scale = self._shape.scale
            attended = functional.scaled_dot_product_attention(queries, keys, values, bias, scale=scale)
            out[token : token + count] = attended.transpose(0, 1).flatten(1)

    def _read(self, blocks: torch.Tensor, table: torch.Tensor, low: int, end: int) -> torch.Tensor:
        """float32[heads, end - low, head_dim]: positions of a slot, each KV head as often as it has query heads."""
        size = self._cache.shape.block_size
        first, number = low // size, -(-end // size)
        heads = blocks[table[first:number].long()].flatten(0, 1)[low - first * size : end - first * size].float()
        return heads.repeat_interleave(self._shape.heads // self._cache.shape.kv_heads, 1).transpose(0, 1)


def _heads_normalised(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32[tokens, heads, head_dim]; head by head, or over all heads if there is a weight for each."""
    if len(weight) == heads.shape[2]:
        return normalised(heads, weight, eps)
    return normalised(heads.flatten(1), weight, eps).view(heads.shape)


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32, over the last dimension"""
    return functional.rms_norm(x, weight.shape, weight, eps)
