"""The simulator's short cuts give what its whole rows would."""

import numpy as np
import pytest

from services.worker.backends.sim.logits import Logits

VOCAB = 512


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_the_greatest_of_what_is_allowed_is_that_of_whole_rows(share: float) -> None:
    logits, rng = Logits(VOCAB, (2,)), np.random.default_rng(1)
    for _ in range(20):
        hashes = rng.integers(0, 2**63, 16).astype(np.uint64)
        allowed = rng.random((16, VOCAB)) < share
        allowed[3] = False
        allowed[np.arange(16), logits.top(hashes)] = False
        rows = np.where(allowed, logits.rows(hashes), -np.inf)
        assert logits.greatest(hashes, allowed).tolist() == rows.argmax(axis=1).tolist()
