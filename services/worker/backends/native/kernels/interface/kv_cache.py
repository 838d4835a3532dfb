"""The paged KV cache of a rank."""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class CacheShape(NamedTuple):
    """A paged KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers; layer by layer, block by block, in the layout of the implementation."""

    shape: CacheShape
    num_blocks: int
    keys: torch.Tensor
    values: torch.Tensor
