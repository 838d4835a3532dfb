"""The calls by which `tests/gpu` runs the cases on a GPU, over another memory of the processor."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from services.worker.device.interface import HostCopy
from tests.gpu.host_kernels import MovedMemory, gpu_kernels
from tests.unit.native.interpreted import CopyingDevice


class Elsewhere(MovedMemory):
    """Memory of the host that is taken for that of a device."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu", 0))


def test_views_keep_their_strides_and_share_their_memory() -> None:
    whole = torch.zeros(4, 6)
    left, right = whole[:, :2], whole[:, 2:]
    memory = Elsewhere()
    moved_left, moved_right = memory.to_device((left, right))
    assert (moved_left.stride(), moved_right.storage_offset()) == (left.stride(), 2)
    moved_left += 1
    moved_right += 2
    assert whole.sum() == 0
    memory.copy_back()
    assert (left == 1).all()
    assert (right == 2).all()


def test_a_result_in_the_callers_memory_is_the_callers() -> None:
    out, memory = torch.zeros(3, 5), Elsewhere()
    result = memory.to_host(memory.to_device(out)[1:])
    assert result.data_ptr() == out[1:].data_ptr()
    fresh = torch.ones(2)
    assert memory.to_host(fresh).tolist() == [1.0, 1.0]


class WorkingDevice(CopyingDevice):
    """A device whose downloads wait for the work inside `working` only."""

    def __init__(self) -> None:
        self.works = False
        self.downloads = 0

    def working(self) -> AbstractContextManager[None]:
        return self._working()

    @contextmanager
    def _working(self) -> Iterator[None]:
        self.works = True
        yield
        self.works = False

    def download(self, *tensors: torch.Tensor) -> HostCopy:
        assert self.works, "the kernels run on another stream"
        self.downloads += 1
        return super().download(*tensors)


def test_calls_run_on_the_stream_of_the_device() -> None:
    device = WorkingDevice()
    rows = np.array([0], np.int32)
    history = torch.zeros(1, 8, dtype=torch.int32)
    found = gpu_kernels(device=device).drafting.lookup(history, rows, rows + 4, range(1, 3), 2, 0.0)
    assert found.tolist() == [[0, 0]]
    assert (device.downloads, device.works) == (1, False)
