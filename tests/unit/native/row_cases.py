"""Random rows of a step, and what row kernels make of them, for tests that compare implementations."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.batch.slots import EMPTY, Rows
from services.worker.kernels.interface.rows import BatchTensors, SlotDrafts

SLOTS, VOCAB, MOST = 12, 50, 4
POISON = -7
"""Content of a batch that was not written."""


def empty_batch(tokens: int) -> BatchTensors:
    ints = [torch.full((tokens,), POISON, dtype=torch.int32) for _ in range(4)]
    return BatchTensors(*ints[:3], torch.full((tokens, 4), POISON, dtype=torch.int32), ints[3])


@dataclass(frozen=True)
class RowCases:
    limit: int
    """Tokens of a sequence."""
    counts: tuple[int, ...]
    """Positions of a row, beside its drafts."""

    def rows(self, rng: np.random.Generator) -> Rows:
        """Return some slots, each with one position, a chunk, or drafts."""
        number = int(rng.integers(0, SLOTS + 1))
        slots = rng.permutation(SLOTS)[:number].astype(np.int32)
        samples = rng.random(number) < 0.7
        drafts = np.where(samples, rng.integers(0, MOST + 1, number), 0).astype(np.int32)
        counts = (rng.choice(self.counts, number) + drafts).astype(np.int32)
        starts = rng.integers(0, self.limit - max(self.counts) - MOST, number).astype(np.int32)
        return Rows(slots, slots, starts, counts, samples, drafts)

    def history(self, rng: np.random.Generator) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, VOCAB, (SLOTS, self.limit)).astype(np.int32))

    def settled(self, kernels: Any, seed: int, is_early: bool) -> tuple[object, int, object, object]:
        """Settle rows: frontiers before the planned start, missing drafts, rows at the end of the context.

        Args:
            is_early: the last row is planned before its frontier.

        Returns: the rows' columns, the row that is refused or -1, the history, and the slots' drafts.
        """
        rng = np.random.default_rng(seed)
        rows, tokens = self.rows(rng), self.history(rng)
        rows.starts[:] += rng.integers(0, 2, len(rows.slots)) * (self.limit - rows.ends)
        frontier = np.full(SLOTS, EMPTY)
        frontier[rows.slots] = np.where(rng.random(len(rows.slots)) < 0.3, EMPTY, rows.starts - rows.drafts)
        if is_early and len(rows.slots):
            frontier[rows.slots[-1]] = rows.starts[-1] + 1
        drafts = SlotDrafts(
            frontier.astype(np.int32),
            rng.integers(0, MOST + 1, SLOTS).astype(np.int32),
            rng.integers(0, VOCAB, (SLOTS, MOST)).astype(np.int32),
        )
        settled, bad = kernels.settle(rows, drafts, tokens)
        columns = None if settled is None else [column.tolist() for column in vars(settled).values()]
        assert (bad >= 0) == (is_early and len(rows.slots) > 0)
        return columns, bad, tokens.tolist(), [column.tolist() for column in drafts]

    def verified(self, kernels: Any, seed: int) -> list[list[int]]:
        """Verify drafts of two kinds of tokens, also at the end of the context."""
        rng = np.random.default_rng(seed)
        number = int(rng.integers(1, SLOTS + 1))
        slots = rng.permutation(SLOTS)[:number].astype(np.int32)
        drafts = rng.integers(0, MOST + 1, number).astype(np.int32)
        acceptable = np.minimum(drafts, rng.integers(0, MOST + 2, number)).astype(np.int32)
        firsts = rng.choice([1, self.limit // 4, self.limit - 2, self.limit - 1], number).astype(np.int32)
        ids = torch.from_numpy(rng.integers(0, 2, int((drafts + 1).sum())).astype(np.int32))
        tokens = self.history(rng) % 2
        return [column.tolist() for column in kernels.verify(slots, firsts, drafts, acceptable, ids, tokens)]
