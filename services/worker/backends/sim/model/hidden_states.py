"""The simulated hidden states: vectors that are functions of a prefix hash, and their sums for mean pooling."""

import numpy as np

from services.worker.backends.sim.model.hashing import BASE, U64
from services.worker.backends.sim.model.logits import F32, scramble
from services.worker.backends.sim.model.oracle import OracleError

HIDDEN_SIZE = 32
_LANES = np.arange(1, HIDDEN_SIZE + 1, dtype=np.uint64) * np.uint64(BASE)


def hidden_states(hashes: U64) -> F32:
    """Return float32[positions, HIDDEN_SIZE] in multiples of 2**-15, from -1 to 1; sums are exact in any order."""
    words = scramble(hashes[:, None] ^ _LANES)
    return ((words >> np.uint64(48)).astype(np.float32) - np.float32(2**15)) * np.float32(2**-15)


class HiddenSums:
    """Sums of hidden states by slot, kept on the device between the chunks of a prompt."""

    def __init__(self, num_slots: int) -> None:
        self._sums = np.zeros((num_slots, HIDDEN_SIZE))
        self._counts = np.zeros(num_slots, np.int32)
        """Positions in each sum."""

    def add(self, slot: int, start: int, hashes: U64) -> None:
        """Add the positions from `start` on, given by uint64[positions] hashes.

        Raises: OracleError, if the positions before were not added because they came from the prefix cache.
        """
        if not start:
            self._sums[slot] = self._counts[slot] = 0
        if self._counts[slot] != start:
            raise OracleError(f"slot {slot}: a mean from {start} on, but {self._counts[slot]} positions are summed")
        self._sums[slot] += hidden_states(hashes).sum(0, np.float64)
        self._counts[slot] += len(hashes)

    def mean(self, slot: int) -> F32:
        return (self._sums[slot] / self._counts[slot]).astype(np.float32)
