"""Embeddings: hidden states after the final norm, of the last token or averaged over all tokens of a request."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.sampling import Pooling
from protocol.steps import SchedulerOutput
from services.worker.batch.slots import Rows, SlotTable


@dataclass
class PooledRows:
    """The rows of one step whose hidden states are needed, in plan order; int32[rows] unless stated."""

    tokens: torch.Tensor
    """int64[tokens]: which of the step's tokens, those of a row back to back"""
    slots: NDArray[np.int32]
    sizes: NDArray[np.int32]
    """Number of tokens of each row."""
    ends: NDArray[np.int32]
    """Number of tokens of the request up to this row."""
    means: NDArray[np.bool_]
    """True: the embedding is an average; False: the last token's state."""
    samples: NDArray[np.bool_]
    """True: the row completes its embedding."""
    sums: torch.Tensor
    """float32[num_slots, hidden]: sums over the tokens of every slot, shared by all steps"""
    embeddings: list[torch.Tensor] = field(default_factory=list)
    """float32[hidden] of each row that completes one, after `take`"""

    def take(self, states: torch.Tensor) -> None:
        """Add float32[tokens, hidden], the states of `tokens`."""
        for row, part in enumerate(states.split(self.sizes.tolist())):
            value = part[-1]
            if self.means[row]:
                total = self.sums[int(self.slots[row])].add_(part.sum(0))
                value = total / int(self.ends[row])
            if self.samples[row]:
                self.embeddings.append(value)

    def to_message(self) -> tuple[bytes, bytes]:
        """Return int32 slots and float32[embeddings, hidden], as `ModelRunnerOutput` has them."""
        if not self.embeddings:
            return b"", b""
        return self.slots[self.samples].tobytes(), torch.stack(self.embeddings).numpy().tobytes()


class Pooler:
    """Averages that are not complete yet, as prompts come in chunks. On the output rank."""

    def __init__(self, num_slots: int, hidden_size: int) -> None:
        self._sums = torch.zeros(num_slots, hidden_size)

    def rows(self, step: SchedulerOutput, rows: Rows, table: SlotTable) -> PooledRows | None:
        """Return the rows of a step that `table` has applied; None where no state is needed."""
        for request in step.new:
            if request.pooling is Pooling.MEAN:
                self._sums[request.slot] = 0
        kinds = table.pooling[rows.slots]
        means = kinds == Pooling.MEAN
        wanted = means | ((kinds == Pooling.LAST) & rows.samples)
        if not wanted.any():
            return None
        last = np.cumsum(rows.counts, dtype=np.int32)
        sizes = np.where(means, rows.counts, 1).astype(np.int32)[wanted]
        offsets = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tokens = np.repeat(last[wanted] - sizes, sizes) + offsets
        return PooledRows(
            tokens=torch.from_numpy(tokens),
            slots=rows.slots[wanted],
            sizes=sizes,
            ends=rows.ends[wanted],
            means=means[wanted],
            samples=rows.samples[wanted],
            sums=self._sums,
        )
