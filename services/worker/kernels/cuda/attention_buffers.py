"""Memory of attention beside the KV cache, allocated once in an epoch."""

import torch
import triton

from services.worker.kernels.cuda.split_plan import most_parts
from services.worker.kernels.interface.attention import AttentionShape

LEAST_ROWS = 16
"""Smallest side of a matrix product in a kernel."""
DRAFTED = 8
"""Tokens of a tile that a program without neighbours computes: a decode row and its drafts."""


class AttentionBuffers:
    """Tensors that the layers of a step share.

    Args:
        tokens: of the largest step
        processors: multiprocessors to occupy
        where: the device; "meta" to know `num_bytes` only
    """

    def __init__(
        self,
        shape: AttentionShape,
        kv_heads: int,
        tokens: int,
        activations: torch.dtype,
        processors: int,
        where: torch.device,
    ) -> None:
        angles = len(shape.frequencies), tokens, shape.head_dim // 2
        self.angles, self.cosines, self.sines = (torch.empty(angles, device=where) for _ in range(3))
        self.queries = torch.empty(tokens, shape.heads * shape.head_dim, dtype=activations, device=where)
        group = shape.heads // kv_heads
        rows = max(padded(group), padded(DRAFTED * group))
        parts = most_parts(tokens, kv_heads, processors) * rows
        self.parts = torch.empty(parts, shape.head_dim, device=where)
        """float32[tiles * kv_heads * splits * rows, head_dim]: results of programs that share the keys of a tile"""
        self.maxima, self.sums = (torch.empty(parts, device=where) for _ in range(2))

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values())


def padded(rows: int) -> int:
    """Return the rows of a program that computes `rows` pairs of token and query head."""
    return max(LEAST_ROWS, triton.next_power_of_2(rows))
