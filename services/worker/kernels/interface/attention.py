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
    """float32[rotations, head_dim / 2]: frequencies of the rotary position embedding, radians per position."""
    rotations: tuple[int, ...] = ()
    """The rotation of each layer; (): the first one in all."""
    amplitudes: torch.Tensor | None = None
    """float32[rotations, head_dim / 2]: factors of sines and cosines; None: 1."""
    scale: float = 0.0
    """Factor of the scores; 0: 1 / sqrt(head_dim)."""
    num_tables: int = 1
    """Block tables of a slot, side by side and equally wide."""
    tables: tuple[int, ...] = ()
    """The block table of each layer; (): the first one in all."""
    places: tuple[int, ...] = ()
    """Index of each layer in the cache; (): its number."""

    def tables_of(self, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each of the tables in `table`, int32[slots, num_tables * blocks], as a view int32[slots, blocks]."""
        return table.chunk(self.num_tables, 1)

    def table_of(self, layer: int) -> int:
        return self.tables[layer] if self.tables else 0

    def place_of(self, layer: int) -> int:
        return self.places[layer] if self.places else layer

    def rotation_of(self, layer: int) -> int:
        return self.rotations[layer] if self.rotations else 0

    @property
    def score_factor(self) -> float:
        return self.scale or self.head_dim**-0.5


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
            norms: weights that normalise queries and keys first: float32[head_dim] each, head by head; or
                float32[heads * head_dim] and float32[kv_heads * head_dim], over all heads of a token
        """
        ...

    def attend(
        self, layer: int, tiles: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        """Compute the attention of the queries that were written last.

        Args:
            tiles: int32[tiles, 4]: slot, first position, first token, tokens
            out: activations[tokens, heads * head_dim]
            sinks: float32[heads]: one more score of each head in the softmax, without a value
        """
        ...
