"""The tokens of every slot, on the device: a step reads as input what earlier steps wrote, however long ago.

A row names positions, never tokens (spec 0.8): prompts are written when a request gets its slot, sampled ids at the
position that they will be computed at. So a request may skip any number of steps, at any depth.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.steps import NewRequest
from services.worker.batch.slots import PlanError


class TokenHistory:
    """int32[num_slots, max_model_len], touched as far as it is written."""

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int) -> None:
        self._tokens = torch.empty(num_slots, max_model_len, dtype=torch.int32)
        self.array: NDArray[np.int32] = self._tokens.numpy()
        """The same, for kernels."""
        self._limit, self._vocab_size = max_model_len, vocab_size

    @property
    def shape(self) -> tuple[int, int]:
        """Slots, and positions of each."""
        return len(self._tokens), self._limit

    @property
    def address(self) -> int:
        """Of the int32 tokens, for kernels; those of a slot lie back to back."""
        return self._tokens.data_ptr()

    def assign(self, request: NewRequest) -> None:
        """Raises: PlanError, when a token is not in the vocabulary."""
        tokens = np.frombuffer(request.token_ids, np.int32)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
            raise PlanError(
                f"slot {request.slot}: token {bad} is not among the {self._vocab_size} of the vocabulary"
            )
        self._tokens[request.slot, : len(tokens)] = torch.from_numpy(tokens.copy())

    def gather(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64[tokens]: the ids at int32 `positions` of `slots`."""
        return self._tokens[slots.long(), positions.long()].long()

    def append(self, slots: NDArray[np.int32], positions: NDArray[np.int32], ids: torch.Tensor) -> None:
        """Writes ids at their positions; those beyond the context are nobody's input."""
        inside = positions < self._limit
        self.array[slots[inside], positions[inside]] = ids.numpy()[inside]
