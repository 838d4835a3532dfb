"""Attention of one step: what its layers share is prepared once, then every layer writes and reads the paged cache."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.batch import Batch
from services.worker.backends.native.config import ModelConfig
from services.worker.backends.native.kernels.attention import attention_kernel, write_kernel
from services.worker.backends.native.kernels.rope import turn_kernel
from services.worker.backends.native.kv_cache import KVCache, padded
from services.worker.backends.native.rope import inverse_frequencies


@dataclass(frozen=True)
class Context:
    """Where one step's rows stand: their tokens, the cache they live in, and the block table of every slot."""

    batch: Batch
    cache: KVCache
    table: NDArray[np.int32]
    """[slots, blocks]"""


def shared_columns(
    config: ModelConfig, cache: KVCache, table: NDArray[np.int32], queries: int
) -> tuple[int, ...]:
    """What both kernels of attention are told of every layer, after the addresses of its keys and values; `queries` is
    the address of float32[tokens, heads, padded head_dim]."""
    return (
        *(table.ctypes.data, table.shape[1], cache.block_size, padded(cache.block_size)),
        *(config.num_heads, config.num_kv_heads, config.head_dim, padded(config.head_dim), queries),
    )


def scores(config: ModelConfig, block_size: int, longest: int) -> int:
    """Of one query with `longest` keys, in all heads that share a KV head."""
    blocks = -(-longest // block_size) + 1
    return config.num_heads // config.num_kv_heads * blocks * padded(block_size)


class Attention:
    """Rotary positions, cache writes and attention, for one calling thread.

    Args:
        activations: of the products before and after
        cache: of keys and values
    """

    def __init__(self, config: ModelConfig, activations: torch.dtype, cache: torch.dtype) -> None:
        self._config = config
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)
        kinds = activations == torch.bfloat16, cache == torch.bfloat16
        self._turn, self._write, self._attend = turn_kernel(), write_kernel(*kinds), attention_kernel(*kinds)

    def begin(self, context: Context) -> None:
        """Prepares what all layers of a step share; it stays until the next step begins."""
        config, batch, cache, table = self._config, context.batch, context.cache, context.table
        tokens, middle = len(batch.slots), config.head_dim // 2
        queries = torch.empty(tokens, config.num_heads, padded(config.head_dim))
        cos, sin = torch.empty(tokens, middle), torch.empty(tokens, middle)
        self._step = context, queries, cos, sin  # addresses of these are used below
        angles = batch.positions.data_ptr(), self._frequencies.data_ptr()
        self._turn.run(tokens, (*angles, cos.data_ptr(), sin.data_ptr(), middle))
        self._shared = shared_columns(config, cache, table, queries.data_ptr())
        self._where = (batch.slots.data_ptr(), batch.positions.data_ptr(), cos.data_ptr(), sin.data_ptr())
        self._scratch = batch.widest * scores(config, cache.block_size, batch.longest)

    def run(
        self,
        layer: int,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
    ) -> None:
        """Attention of one layer. The keys of all rows are written before any is read (spec 0.7).

        Args:
            qkv: activations[tokens, (heads + 2 * kv_heads) * head_dim]
            norms: float32[head_dim] weights that normalise each query and key head
            out: activations[tokens, heads * head_dim], written
        """
        config, (context, *_) = self._config, self._step
        cache, batch = context.cache, context.batch
        shared = (cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), *self._shared)
        weights = tuple(weight.data_ptr() for weight in norms) if norms else (0, 0)
        numbers = (config.norm_eps, config.head_dim**-0.5)
        self._write.run(len(qkv), (*shared, qkv.data_ptr(), *self._where, *weights, *numbers))
        tiles = (out.data_ptr(), batch.tiles.data_ptr(), config.windows[layer], self._scratch)
        self._attend.run(batch.num_tiles * config.num_kv_heads, (*shared, *tiles))
