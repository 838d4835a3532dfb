"""The simulated hidden states: vectors that are functions of a prefix hash."""

import numpy as np

from services.worker.backends.sim.model.hashing import BASE, U64
from services.worker.backends.sim.model.logits import F32, scramble

HIDDEN_SIZE = 32
_LANES = np.arange(1, HIDDEN_SIZE + 1, dtype=np.uint64) * np.uint64(BASE)


def hidden_states(hashes: U64) -> F32:
    """Return float32[positions, HIDDEN_SIZE] in multiples of 2**-15, from -1 to 1; sums are exact in any order."""
    words = scramble(hashes[:, None] ^ _LANES)
    return ((words >> np.uint64(48)).astype(np.float32) - np.float32(2**15)) * np.float32(2**-15)
