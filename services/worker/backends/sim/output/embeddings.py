"""Embeddings of one step's pooled rows."""

import numpy as np
from numpy.typing import NDArray

from protocol.rows import EmbeddingRows
from protocol.sampling import Pooling
from services.worker.backends.sim.device.simulated import SimDevice, SimEvent
from services.worker.backends.sim.model.hidden_states import HIDDEN_SIZE, HiddenSums, hidden_states
from services.worker.backends.sim.model.oracle import Oracle
from services.worker.batch.slots import Rows, SlotTable


class StepEmbeddings:
    """Pooled rows of one step, in device memory of this step alone (result memory; docs/invariants.md)."""

    def __init__(self, rows: Rows, means: NDArray[np.bool_]) -> None:
        self._rows, self._means = rows, means
        self._values = np.empty((int(rows.samples.sum()), HIDDEN_SIZE), np.float32)

    @classmethod
    def from_rows(cls, rows: Rows, table: SlotTable) -> "StepEmbeddings | None":
        """Lay out the embeddings of the plan that was just applied; None if no row is pooled."""
        pooled = rows.select(table.pooling[rows.slots] != Pooling.NONE)
        if not len(pooled.slots):
            return None
        return cls(pooled, table.pooling[pooled.slots] == Pooling.MEAN)

    def compute(self, oracle: Oracle, sums: HiddenSums) -> None:
        """Add chunks to their sums and make the embeddings of completed prompts. Runs on the device."""
        rows, embeddings = self._rows, []
        columns = (rows.slots, rows.starts, rows.ends, self._means, rows.samples)
        for slot, start, end, mean, samples in zip(*(c.tolist() for c in columns), strict=True):
            hashes = oracle.chain[slot, start + 1 : end + 1]
            if mean:
                sums.add(slot, start, hashes)
            if samples:
                embeddings.append(sums.mean(slot) if mean else hidden_states(hashes[-1:])[0])
        self._values[:] = np.array(embeddings, np.float32).reshape(-1, HIDDEN_SIZE)

    def copy_out(self, device: SimDevice) -> tuple[EmbeddingRows, SimEvent]:
        """Enqueue the copy to the host. The event is that of the copy."""
        values, copied = device.copy_out(self._values)
        slots = self._rows.slots[self._rows.samples]
        return EmbeddingRows(slots, np.full(len(slots), HIDDEN_SIZE, np.int32), values), copied
