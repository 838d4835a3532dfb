"""Operations of `RowKernels` on the host: the token history, and the placement of masks."""

import numpy as np
import torch

from services.worker.kernels.interface.arrays import I32
from services.worker.kernels.interface.rows import PlacedMasks


def place_masks(slots: I32, drafts: I32, masked: I32, counts: I32) -> PlacedMasks:
    """See `RowKernels.place_masks`."""
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


class HostHistory:
    """The operations of `RowKernels` on the token history."""

    def write_prompt(self, history: torch.Tensor, slot: int, tokens: I32) -> None:
        history.numpy()[slot, : len(tokens)] = tokens

    def write_tokens(self, history: torch.Tensor, slots: I32, positions: I32, ids: torch.Tensor) -> None:
        limit, values = history.shape[1], ids.numpy()
        if positions.max(initial=0) >= limit:
            inside = positions < limit
            slots, positions, values = slots[inside], positions[inside], values[inside]
        history.numpy()[slots, positions] = values

    def read_tokens(self, history: torch.Tensor, slots: I32, positions: I32) -> torch.Tensor:
        return torch.from_numpy(history.numpy()[slots, positions])
