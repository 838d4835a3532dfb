"""The most likely token of a row and its chance."""

import numpy as np
import pytest
import torch

from services.worker.backends.native.kernels.likeliest import likeliest_kernel


@pytest.mark.parametrize("vocab", [1, 7, 16, 211, 1024])
def test_likeliest(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(9, vocab) * 5
    logits[1] = 3.0  # all alike: the lowest id
    logits[2, -1] = 200.0
    ids, chances = np.empty(9, np.int32), np.empty(9, np.float32)
    sharpness = np.array([1, 1, 0.5, 2.5, 1, 4, 0.1, 1, 2], np.float32)
    addresses = ids.ctypes.data, chances.ctypes.data, sharpness.ctypes.data
    likeliest_kernel().run(9, (logits.data_ptr(), vocab, *addresses))
    assert ids.tolist() == logits.argmax(1).tolist()
    assert ids[1] == 0
    np.testing.assert_allclose(
        chances, (logits * torch.from_numpy(sharpness)[:, None]).softmax(1).amax(1).numpy(), rtol=1e-5
    )
