"""Memory of attention beside the KV cache, allocated once in an epoch."""

import torch
import triton

from services.worker.kernels.cuda.split_plan import most_parts

LEAST_ROWS = 16
"""Smallest side of a matrix product in a kernel."""
DRAFTED = 8
"""Tokens of a tile that a program without neighbours computes: a decode row and its drafts."""


class AttentionBuffers:
    """Tensors that the layers of a step share.

    Args:
        group: query heads of a KV head
        tokens: of the largest step
        processors: multiprocessors to occupy
        where: the device; "meta" to know `num_bytes` only
        rotations: kinds of rotary positions
    """

    def __init__(
        self,
        heads: int,
        group: int,
        head_dim: int,
        tokens: int,
        activations: torch.dtype,
        processors: int,
        where: torch.device,
        rotations: int = 1,
    ) -> None:
        self.angles, self.cosines, self.sines = (
            torch.empty(rotations, tokens, head_dim // 2, device=where) for _ in range(3)
        )
        self.queries = torch.empty(tokens, heads * head_dim, dtype=activations, device=where)
        rows = max(padded(group), padded(DRAFTED * group))
        parts = most_parts(tokens, heads // group, processors) * rows
        self.parts = torch.empty(parts, head_dim, device=where)
        """float32[tiles * kv_heads * splits * rows, head_dim]: results of programs that share the keys of a tile"""
        self.maxima, self.sums = (torch.empty(parts, device=where) for _ in range(2))

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values())


def padded(rows: int) -> int:
    """Return the rows of a program that computes `rows` pairs of token and query head."""
    return max(LEAST_ROWS, triton.next_power_of_2(rows))
