"""The paged KV cache of a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Returns memory for a tensor of these sizes."""


def own_memory(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An `Allocate`. The system allocates the pages at first use."""
    return torch.empty(*sizes, dtype=dtype)


def memory_of(take: Callable[[int, int], memoryview]) -> Allocate:
    """Return an `Allocate` that takes memory from elsewhere, of caches whose sizes begin with layers and blocks."""

    def allocate(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(take(prod(sizes) * dtype.itemsize, sizes[0]), dtype=dtype).view(*sizes)

    return allocate


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
    keys: torch.Tensor
    values: torch.Tensor
