"""Embeddings: hidden states after the final norm, of the last token or averaged over all tokens of a request."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.columns import has_any
from protocol.sampling import Pooling
from services.worker.batch.slots import BatchColumns, Rows, spread


@dataclass
class PooledRows:
    """The rows of one step whose hidden states are needed, in plan order; int32[rows] unless stated."""

    tokens: NDArray[np.int32]
    """int32[tokens]: which of the step's tokens, those of a row back to back"""
    slots: NDArray[np.int32]
    sizes: NDArray[np.int32]
    """Number of tokens of each row."""
    begins: NDArray[np.bool_]
    """True: the row is the request's first."""
    ends: NDArray[np.int32]
    """Number of tokens of the request up to this row."""
    means: NDArray[np.bool_]
    """True: the embedding is an average; False: the last token's state."""
    samples: NDArray[np.bool_]
    """True: the row completes its embedding."""
    sums: torch.Tensor
    """float32[num_slots, hidden]: sums over the tokens of every slot, shared by all steps"""
    embeddings: torch.Tensor
    """float32[completed, hidden] on the device: of each row that completes one, after `take`"""

    def take(self, states: torch.Tensor) -> None:
        """Add float32[tokens, hidden], the states of `tokens`."""
        completed = iter(self.embeddings)
        for row, part in enumerate(states.split(self.sizes.tolist())):
            value = part[-1]
            if self.means[row]:
                total = self.sums[int(self.slots[row])]
                if self.begins[row]:
                    total.zero_()
                total.add_(part.sum(0))
                value = total / int(self.ends[row])
            if self.samples[row]:
                next(completed).copy_(value)

    def to_message(self, embeddings: NDArray[np.float32]) -> tuple[bytes, bytes]:
        """Return int32 slots and float32[completed, hidden], as `ModelRunnerOutput` has them. `embeddings` are those of
        these rows on the host."""
        return (self.slots[self.samples].tobytes(), embeddings.tobytes()) if len(embeddings) else (b"", b"")


class Pooler:
    """Averages that are not complete yet, as prompts come in chunks. On the output rank."""

    def __init__(self, num_slots: int, hidden_size: int, where: torch.device) -> None:
        self._sums = torch.zeros(num_slots, hidden_size, device=where)

    def rows(self, rows: Rows, table: BatchColumns) -> PooledRows | None:
        """Return the pooled ones of a step's rows, which `table` has applied; None where no state is needed."""
        kinds = table.pooling[rows.slots]
        if not np.count_nonzero(kinds):  # every step pays for this; `any` and a comparison with an enumeration are slow
            return None
        means = kinds == Pooling.MEAN
        wanted = means | ((kinds == Pooling.LAST) & rows.samples)
        if not has_any(wanted):
            return None
        last = np.cumsum(rows.counts, dtype=np.int32)
        sizes = np.where(means, rows.counts, np.int32(1))[wanted]
        owners, offsets = spread(sizes)
        completed = int(np.count_nonzero(rows.samples[wanted]))
        return PooledRows(
            tokens=(last[wanted] - sizes)[owners] + offsets,
            slots=rows.slots[wanted],
            sizes=sizes,
            begins=rows.starts[wanted] == 0,
            ends=rows.ends[wanted],
            means=means[wanted],
            samples=rows.samples[wanted],
            sums=self._sums,
            embeddings=self._sums.new_empty(completed, self._sums.shape[1]),
        )
