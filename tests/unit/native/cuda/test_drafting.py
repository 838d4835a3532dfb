"""Prompt lookup on torch operations against the reference."""

import numpy as np
import pytest
import torch

from services.worker.kernels.interface.drafting import DraftingKernels
from tests.unit.native.cuda.kernel_cases import KernelMaker


@pytest.mark.parametrize("seed", range(20))
def test_lookups_are_equal(make: KernelMaker, seed: int) -> None:
    """Random sequences of few tokens, so that there are matches of every size."""
    rng = np.random.default_rng(seed)
    history = torch.from_numpy(rng.integers(0, 3, (6, 40)).astype(np.int32))
    slots = rng.permutation(6)[: int(rng.integers(0, 7))].astype(np.int32)
    lengths = rng.integers(1, 41, len(slots)).astype(np.int32)
    sizes, k = range(int(rng.integers(1, 3)), int(rng.integers(3, 6))), int(rng.integers(1, 9))
    arguments = history, slots, lengths, sizes, k, float(rng.choice([0.0, 0.3, 0.7]))
    ours = make().drafting.lookup(*arguments)
    assert ours.tolist() == DraftingKernels().lookup(*arguments).tolist()
