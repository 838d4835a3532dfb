"""The simulator's shortcuts give the same tokens as whole rows of logits."""

import numpy as np
import pytest

from services.worker.backends.sim.model.logits import Logits


@pytest.mark.parametrize("vocab", [1, 31, 33, 512])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_the_greatest_allowed_token_is_that_of_whole_rows(share: float, vocab: int) -> None:
    logits, rng = Logits(vocab, (2,)), np.random.default_rng(1)
    for _ in range(20):
        hashes = rng.integers(0, 2**63, 16).astype(np.uint64)
        allowed = rng.random((16, vocab)) < share
        allowed[3] = False
        allowed[np.arange(16), logits.top(hashes)] = False
        rows = np.where(allowed, logits.rows(hashes), -np.inf)
        assert logits.greatest(hashes, bitmask(allowed)).tolist() == rows.argmax(axis=1).tolist()


def bitmask(allowed: np.ndarray) -> np.ndarray:
    """Pack bool[rows, vocab] to int32[rows, ceil(vocab / 32)]; bits beyond the vocabulary are set, as in a free row."""
    beyond = -allowed.shape[1] % 32
    padded = np.pad(allowed, ((0, 0), (0, beyond)), constant_values=True)
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)
