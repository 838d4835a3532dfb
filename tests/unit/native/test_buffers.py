"""Memory of recorded operations before the first step."""

from collections.abc import Iterator

import pytest
import torch

from services.worker.kernels.interface.buffers import Buffers


class SmallBuffers(Buffers):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), tokens=8)
        self.slots = self._rows("tokens", dtype=torch.int32, padding=-1)
        self.hidden = self._rows("tokens", 4)


@pytest.fixture
def garbage_in_new_memory() -> Iterator[None]:
    """`torch.empty` returns NaN, as deterministic algorithms ask for."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("garbage_in_new_memory")
def test_padding_rows_of_activations_are_zeros_at_first() -> None:
    """A replayed graph computes padding rows, too."""
    assert torch.empty(1).isnan().all()
    buffers = SmallBuffers()
    assert not buffers.hidden.any()
    assert (buffers.slots == -1).all()
