"""Embeddings: hidden states after the final norm, of the last token or averaged over all tokens of a request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.columns import has_any
from protocol.sampling import Pooling
from services.worker.batch.slots import BatchColumns, PlanError, Rows, spread

Array = Any
"""A tensor of torch; on the simulator, which does not import torch, an array of NumPy. Only what both have is used."""


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
    sums: Array
    """[num_slots, hidden]: sums over the tokens of every slot, shared by all steps"""
    embeddings: Array
    """[completed, hidden] on the device: of each row that completes one, after `take`"""
    in_order: bool
    """See `Pooler`."""

    def take(self, states: Array) -> None:
        """Add [tokens, hidden], the states of `tokens`."""
        completed, begin = iter(self.embeddings), 0
        for row, size in enumerate(self.sizes.tolist()):
            part, begin = states[begin : begin + size], begin + size
            value = part[-1]
            if self.means[row]:
                total = self.sums[int(self.slots[row])]
                if self.begins[row]:
                    total[:] = 0
                for state in part if self.in_order else (part.sum(0),):
                    total += state
                value = total / int(self.ends[row])
            if self.samples[row]:
                next(completed)[:] = value

    def to_message(self, embeddings: NDArray[np.float32]) -> tuple[bytes, bytes]:
        """Return int32 slots and float32[completed, hidden], as `ModelRunnerOutput` has them. `embeddings` are those of
        these rows on the host."""
        return (self.slots[self.samples].tobytes(), embeddings.tobytes()) if len(embeddings) else (b"", b"")


class Pooler:
    """Averages that are not complete yet, as prompts come in chunks. On the output rank.

    Args:
        zeros: returns an array of this shape where the hidden states are.
        in_order: add states one by one, so that an average has the same bits in chunks of any size (batch invariance,
            docs/invariants.md).
    """

    def __init__(
        self, num_slots: int, hidden_size: int, zeros: Callable[[int, int], Array], in_order: bool = False
    ) -> None:
        self._hidden_size, self._zeros, self._in_order = hidden_size, zeros, in_order
        self._sums = zeros(num_slots, hidden_size)
        self._summed = np.zeros(num_slots, np.int32)
        """Positions in the sum of each slot."""

    def rows(self, rows: Rows, table: BatchColumns) -> PooledRows | None:
        """Return the pooled ones of a step's rows, which `table` has applied; None where no state is needed.

        Raises: PlanError, if the states before a mean's row were not summed, because they came from the prefix cache.
        """
        kinds = table.pooling[rows.slots]
        if not np.count_nonzero(kinds):  # every step pays for this; `any` and a comparison with an enumeration are slow
            return None
        means = kinds == Pooling.MEAN
        wanted = means | ((kinds == Pooling.LAST) & rows.samples)
        if not has_any(wanted):
            return None
        summed = np.where(rows.starts == 0, 0, self._summed[rows.slots])
        if (wrong := means & (rows.starts != summed)).any():
            i = int(wrong.argmax())
            raise PlanError(
                f"slot {rows.slots[i]}: a mean from {rows.starts[i]} on, but {summed[i]} positions are summed"
            )
        self._summed[rows.slots[means]] = rows.ends[means]
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
            embeddings=self._zeros(completed, self._hidden_size),
            in_order=self._in_order,
        )
