"""Attention of a step."""

from typing import NamedTuple, Protocol

import torch


class AttentionShape(NamedTuple):
    """Attention of every layer of a model."""

    heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Number of keys that a query reads in each layer, its own included; 0: all."""
    norm_eps: float
    frequencies: torch.Tensor
    """float32[head_dim / 2]: frequencies of the rotary position embedding, radians per position."""


class Attention(Protocol):
    """Rotary positions, writes to the cache and attention, layer after layer of one step."""

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Prepare data that the layers of a step share, from the tokens' positions and slots, int32[tokens] each."""
        ...

    def write(
        self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """Rotate queries and keys; write keys and values to the cache, before any query reads (write before read).

        Args:
            qkv: activations[tokens, (heads + 2 * kv_heads) * head_dim]
            norms: float32[head_dim] weights that normalise each query head and each key head first
        """
        ...

    def attend(self, layer: int, tiles: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the attention of the queries that were written last.

        Args:
            tiles: int32[tiles, 4]: slot, first position, first token, tokens
            out: activations[tokens, heads * head_dim]
        """
        ...
