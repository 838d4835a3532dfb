"""The tokens of every slot, on the device. A step reads as input the tokens that any earlier step wrote.

A row names positions, never tokens (slot history, docs/invariants.md): prompts are written when a request gets its
slot, and sampled ids at their positions. So a request may skip any number of steps.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.steps import NewRequest
from services.worker.batch.slots import PlanError


class TokenHistory:
    """Tokens by slot and position. The system allocates only the pages that are written."""

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int) -> None:
        self.tokens = torch.empty(num_slots, max_model_len, dtype=torch.int32)
        """int32[num_slots, max_model_len]"""
        self._array = self.tokens.numpy()
        self._limit, self._vocab_size = max_model_len, vocab_size

    def assign(self, request: NewRequest) -> None:
        """Write the tokens of a new request. Raises: PlanError, if one is not in the vocabulary."""
        tokens = np.frombuffer(request.token_ids, np.int32)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
            raise PlanError(
                f"slot {request.slot}: token {bad} is not among the {self._vocab_size} of the vocabulary"
            )
        self._array[request.slot, : len(tokens)] = tokens

    def gather(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the ids at `positions` of `slots`, int32[tokens]."""
        return self._array[slots, positions]

    def append(self, slots: NDArray[np.int32], positions: NDArray[np.int32], ids: torch.Tensor) -> None:
        """Write int32[tokens] ids at their positions. Positions beyond the context are skipped: no step reads them."""
        if positions.max(initial=0) < self._limit:
            self._array[slots, positions] = ids.numpy()
            return
        inside = positions < self._limit
        self._array[slots[inside], positions[inside]] = ids.numpy()[inside]
