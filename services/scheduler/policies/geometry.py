"""Shapes of a device that pads: prompts to whole blocks and whole chunks, decode batches to a rectangle.

A prompt is padded on its left so that it ends with its last block, and is computed in chunks of one size. In a decode
step every block table is as wide as the widest; `tkv` is the longest row of that rectangle. All lengths are in tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.scheduler.core.slots import Column, SlotIds


@dataclass(frozen=True, slots=True)
class Geometry:
    block: int
    chunk: int
    """A multiple of `block`."""

    def round_up(self, tokens: int) -> int:
        """Round up to whole blocks."""
        return -(-tokens // self.block) * self.block

    def left_padding(self, tokens: int) -> int:
        """Empty positions before a prompt: a multiple of `block`, below `chunk`."""
        return -self.round_up(tokens) % self.chunk

    def chunk_end(self, tokens: int, frontier: int) -> int:
        """End of the chunk that begins at `frontier` of a prompt of `tokens`."""
        padding = self.left_padding(tokens)
        return min(tokens, ((padding + frontier) // self.chunk + 1) * self.chunk - padding)

    def usable_prefix(self, tokens: int, hit: int) -> int:
        """Cached tokens, of `hit`, that whole chunks skip. The last chunk is always computed."""
        padding = self.left_padding(tokens)
        last = (padding + tokens - 1) // self.chunk
        return max(0, min((padding + hit) // self.chunk, last) * self.chunk - padding)

    def tkv(self, lengths: Column) -> int:
        """Longest row of a decode step with its padding: the widest table and the fullest last block.

        Args:
            lengths: int32[rows], tokens of each row with the one that the step computes; at least one row.
        """
        blocks = -(-lengths // self.block)
        return int(blocks.max()) * self.block + int((lengths - blocks * self.block).max())

    def fitting(self, lengths: Column, max_rows: int, max_tkv: int, max_volume: int) -> SlotIds:
        """Indices of the rows that one decode step can take. Rows are tried in order; a row is left out if the step
        would exceed `max_rows`, `max_tkv` or `max_volume` (rows times longest row)."""
        rows = len(lengths)
        if not rows or (rows <= max_rows and (tkv := self.tkv(lengths)) <= max_tkv and rows * tkv <= max_volume):
            return np.arange(rows)
        blocks = -(-lengths // self.block)
        chosen: list[int] = []
        widest, fullest = 0, -self.block
        for row, (own, length) in enumerate(zip(blocks.tolist(), lengths.tolist(), strict=True)):
            wider, fuller = max(widest, own), max(fullest, length - own * self.block)
            tkv = wider * self.block + fuller
            if len(chosen) < max_rows and tkv <= max_tkv and (len(chosen) + 1) * tkv <= max_volume:
                chosen.append(row)
                widest, fullest = wider, fuller
        return np.array(chosen, np.int64)

    # -- projections (volume limit) ------------------------------------------------------------------------------

    def joining(self, tkv: int, tokens: int) -> int:
        """Length of a new request of `tokens` in the rectangle of the present decodes."""
        return max(tkv, tokens) // self.block * self.block + tokens % self.block

    def last_length(self, start: int, steps: int) -> int:
        """Upper bound of the rectangle after `steps` more tokens, with a block of slack for block crossings."""
        return self.round_up(start + steps - 1) + self.block

    def longest_request(self, volume: int) -> int:
        """Largest context whose last length, as a row alone, is within a volume; at least 1."""
        return max((volume // self.block - 1) * self.block, 1)

    @staticmethod
    def peak_volume(newcomer: int, decoders: Iterable[int]) -> int:
        """Largest rows times length of any later step, from the lengths at which each row ends."""
        ends = sorted(decoders)
        rows, peak = len(ends) + 1, 0
        for end in ends:
            if newcomer <= end:
                break
            peak, rows = max(peak, rows * end), rows - 1
        return max(peak, rows * newcomer)
