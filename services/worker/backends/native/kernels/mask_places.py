"""Placement of the masks of a step, in plain Python: see `RowKernels.place_masks`."""

import numpy as np

from services.worker.backends.native.kernels.interface.arrays import I32
from services.worker.backends.native.kernels.interface.rows import PlacedMasks


def place_masks(slots: I32, drafts: I32, masked: I32, counts: I32) -> PlacedMasks:
    row_of = {slot: row for row, slot in enumerate(slots.tolist())}
    firsts, tokens, acceptable = np.cumsum(drafts + 1) - drafts - 1, list[int](), drafts.copy()
    for slot, count in zip(masked.tolist(), counts.tolist(), strict=True):
        used = 0
        if (row := row_of.get(slot)) is not None:
            used = min(count, 1 + int(drafts[row]))
            tokens += range(firsts[row], firsts[row] + used)
            acceptable[row] = used - 1
        tokens += [-1] * (count - used)
    return PlacedMasks(np.array(tokens, np.int32), acceptable)
