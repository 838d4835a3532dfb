"""The token history in memory of the host, for kernels that compute there."""

import torch

from services.worker.backends.native.kernels.interface.arrays import I32


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
