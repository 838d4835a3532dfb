"""The paged KV cache of all layers: one tensor for keys, one for values, allocated once and touched when used."""

import torch

from services.worker.backends.native.config import ModelConfig
from services.worker.backends.native.kernels.simd import LANES


def padded(size: int) -> int:
    """The next multiple of what a vector holds."""
    return -(-size // LANES) * LANES


class KVCache:
    """keys[layer]: [blocks, kv_heads, padded head_dim, padded block_size], transposed for the attention kernel;
    values[layer]: [blocks, kv_heads, block_size, padded head_dim]."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        layers, heads, dim = config.num_layers, config.num_kv_heads, padded(config.head_dim)
        self.num_blocks, self.block_size, self.dtype = num_blocks, block_size, dtype
        self.keys = torch.empty(layers, num_blocks, heads, dim, padded(block_size), dtype=dtype)
        self.values = torch.empty(layers, num_blocks, heads, block_size, dim, dtype=dtype)

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        per_head = padded(config.head_dim) * (padded(block_size) + block_size)
        return config.num_layers * config.num_kv_heads * per_head * dtype.itemsize
