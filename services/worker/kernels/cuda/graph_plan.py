"""The batch sizes whose decode steps are captured as CUDA graphs, and the graph that a step replays.

A graph has a fixed number of rows. A step with fewer rows replays the next larger graph; the rows behind its own are
padding rows, which `CudaRows.lay_out` writes: slot -1, so nothing is written to the cache, and tiles without tokens.
The sizes are so dense that a step never has more than `MOST_PADDING` of them.
"""

from dataclasses import dataclass
from typing import Self

MOST_ROWS = 512
"""Rows of the largest graph. Larger batches compute for longer than the host needs to launch their kernels."""
MOST_PADDING = 31
"""Largest number of padding rows in a step."""
_NODES_PER_LAYER, _NODE_BYTES = 12, 13 << 10
"""Kernels of a layer in a graph, and the memory that the driver takes for one: 26 graphs of Llama 3.1 8B take 122 MiB
on an H100 with CUDA 13.0."""
_STEPS = ((8, 1), (32, 4), (256, 8), (MOST_ROWS, 32))
"""Largest size and distance between sizes."""


@dataclass(frozen=True)
class GraphPlan:
    sizes: tuple[int, ...]
    """Rows, ascending."""

    @classmethod
    def for_rows(cls, most: int) -> Self:
        """Return a plan for steps of up to `most` rows, the capacity of the buffers."""
        most = min(most, MOST_ROWS)
        sizes: list[int] = []
        for end, distance in _STEPS:
            first = sizes[-1] + distance if sizes else 1
            sizes += range(first, min(end, most) + 1, distance)
        if most and sizes[-1] < most:
            sizes.append(most)
        return cls(tuple(sizes))

    def size_of(self, tokens: int, tiles: int, sampled: int) -> int | None:
        """Return the size of the graph that a step replays, or None: its kernels are launched one by one.

        A graph computes tiles of one token. Steps with chunks of prompts or many drafts have fewer tiles than tokens.
        """
        if tokens != tiles or sampled > tokens or not 0 < tokens <= (self.sizes[-1] if self.sizes else 0):
            return None
        return next(size for size in self.sizes if size >= tokens)

    def num_bytes(self, layers: int, row: int) -> int:
        """Return the estimated memory of all graphs. `row`: bytes of what they allocate for a row; the largest one's
        memory is used by all. Other operations write to buffers."""
        return len(self.sizes) * layers * _NODES_PER_LAYER * _NODE_BYTES + max(self.sizes, default=0) * row

    def compiled_tiles(self, most: int) -> tuple[int, ...]:
        """Return numbers of tiles, at most `most`, of steps with chunks. Their kernels differ in the number of programs
        that share the keys of a tile. Twice the tiles halve it at most, so each number in between has that of one of
        its neighbours."""
        powers = {1 << exponent for exponent in range(max(most, 0).bit_length())}
        return tuple(sorted(powers | {most})) if powers else ()


def padded_rows(rows: int, capacity: int) -> int:
    """Return the number of rows that are written for a step, including those that its graph may add."""
    return min(rows + MOST_PADDING, capacity)
