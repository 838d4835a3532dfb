"""The tokens of every slot, on the device. A step reads as input the tokens that any earlier step wrote.

A row names positions, never tokens (slot history, docs/invariants.md): prompts are written when a request gets its
slot, and sampled ids at their positions. So a request may skip any number of steps.
"""

import numpy as np
import torch

from protocol.steps import NewRequest
from services.worker.batch.slots import I32, PlanError
from services.worker.kernels.interface.kernels import Kernels


class TokenHistory:
    """Tokens by slot and position. The system allocates only the pages of the host that are written."""

    def __init__(self, num_slots: int, max_model_len: int, vocab_size: int, kernels: Kernels) -> None:
        where = kernels.device.where
        self.tokens = torch.empty(num_slots, max_model_len, dtype=torch.int32, device=where)
        """int32[num_slots, max_model_len]"""
        self._vocab_size, self._rows = vocab_size, kernels.rows

    def assign(self, request: NewRequest) -> None:
        """Write the tokens of a new request. Raises: PlanError, if one is not in the vocabulary."""
        tokens = np.frombuffer(request.token_ids, np.int32)
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
            raise PlanError(f"slot {request.slot}: token {bad} is not among the {self._vocab_size} of the vocabulary")
        self._rows.write_prompt(self.tokens, request.slot, tokens)

    def gather(self, slots: I32, positions: I32) -> torch.Tensor:
        """Return the ids at `positions` of `slots`, int32[tokens]."""
        return self._rows.read_tokens(self.tokens, slots, positions)

    def append(self, slots: I32, positions: I32, ids: torch.Tensor) -> None:
        """Write int32[tokens] ids at their positions. Positions beyond the context are skipped: no step reads them."""
        self._rows.write_tokens(self.tokens, slots, positions, ids)
