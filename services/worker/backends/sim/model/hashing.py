"""Hashes of prefixes, one per position, computed for whole chunks at once.

`chain[i]` is the hash of the first i tokens: chain[0] = SEED and chain[i + 1] = chain[i] * BASE + word(token i), modulo
2**64, with a random-looking word per token. Since this is a polynomial, a chunk is one cumulative sum over words scaled
by powers of BASE. The hash protects against mistakes, not against an adversary.
"""

import numpy as np
from numpy.typing import NDArray

from services.worker.backends.sim.model.logits import scramble

U64 = NDArray[np.uint64]
SEED = np.uint64(0x243F6A8885A308D3)
BASE = 0x9E3779B97F4A7C15


class PrefixHash:
    """Hashes of sequences of at most `max_len` tokens out of `vocab_size`."""

    def __init__(self, vocab_size: int, max_len: int) -> None:
        self._words = scramble(np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(BASE))
        self._powers = _powers(BASE, max_len + 1)
        self._inverses = _powers(pow(BASE, -1, 2**64), max_len + 1)

    def step(self, previous: U64, tokens: NDArray[np.int32]) -> U64:
        """Return uint64[rows]: many chains, each after one more token."""
        return previous * np.uint64(BASE) + self._words[tokens]

    def chunk(self, previous: np.uint64, tokens: NDArray[np.int32]) -> U64:
        """Return uint64[tokens]: one chain after each of its next tokens."""
        n = len(tokens)
        sums = np.cumsum(self._words[tokens] * self._inverses[:n], dtype=np.uint64)
        return self._powers[1 : n + 1] * previous + self._powers[:n] * sums


def _powers(base: int, count: int) -> U64:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)
