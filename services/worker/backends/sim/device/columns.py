"""Columns of a step that the host fills and the device copies (host-buffer rule, docs/invariants.md)."""

import numpy as np
from numpy.typing import NDArray

from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.batch.slots import I32, Rows, SlotTable


class StepColumns:
    """One set of buffers, on the host or on the device; the first `rows` entries are valid.

    Columns int32[num_slots]: slots, starts, counts and drafts as planned, num_prompt, top_k; float32: temperature,
    top_p, min_p; uint64: seed; block_table int32[num_slots, blocks].
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.slots, self.starts, self.counts, self.drafts = np.zeros((4, num_slots), np.int32)
        self.num_prompt, self.top_k = np.zeros((2, num_slots), np.int32)
        self.temperature, self.top_p, self.min_p = np.zeros((3, num_slots), np.float32)
        self.seed = np.zeros(num_slots, np.uint64)
        self.block_table: I32 = np.zeros((num_slots, max_blocks), np.int32)

    def fill(self, rows: Rows, table: SlotTable, width: int) -> None:
        """Write one step's columns on the host, with `width` blocks of each block table."""
        n = len(rows.slots)
        self.slots[:n], self.starts[:n], self.counts[:n] = rows.slots, rows.starts, rows.counts
        self.drafts[:n] = rows.drafts
        for name in ("num_prompt", "top_k", "temperature", "top_p", "min_p", "seed"):
            column: NDArray[np.generic] = getattr(self, name)
            column[:n] = getattr(table, name)[rows.slots]
        self.block_table[:n, :width] = table.block_table[rows.slots, :width]

    def copy_to(self, device: SimDevice, target: "StepColumns", rows: int, width: int) -> None:
        """Enqueue the copies of one step's columns."""
        for name, column in vars(self).items():
            part = (slice(rows), slice(width)) if name == "block_table" else slice(rows)
            device.copy_in(vars(target)[name][part], column[part])
