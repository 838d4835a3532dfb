"""Copies, order and times of a GPU."""

import time

import numpy as np
import pytest
import torch

from services.worker.device.cuda import CudaDevice
from services.worker.runner import MAX_STEPS_IN_FLIGHT


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice()


def test_columns_arrive_with_their_shapes(device: CudaDevice) -> None:
    columns = np.arange(5, dtype=np.int32), np.ones((2, 3), np.float32), np.array([2**64 - 1], np.uint64)
    with device.working():
        arrays = device.download(*device.upload(*columns))()
    for column, array in zip(columns, arrays, strict=True):
        assert array.shape == column.shape
        assert array.view(column.dtype).tolist() == column.tolist()


def test_memory_of_an_upload_is_used_again_behind_its_copy(device: CudaDevice) -> None:
    with device.working():
        copies = []
        for step in range(4 * MAX_STEPS_IN_FLIGHT):
            torch.cuda._sleep(1_000_000)  # noqa: SLF001  torch has no public kernel that only takes time
            copies.append(device.download(*device.upload(np.full(1000, step, np.int32))))
        assert [int(copy()[0][-1]) for copy in copies] == list(range(4 * MAX_STEPS_IN_FLIGHT))


def test_a_download_does_not_wait_for_later_work(device: CudaDevice) -> None:
    with device.working():
        (uploaded,) = device.upload(np.array([7], np.int32))
        copy = device.download(uploaded)
        torch.cuda._sleep(3_000_000_000)  # noqa: SLF001  torch has no public kernel that only takes time
        later = torch.cuda.Event()
        later.record()
        assert copy()[0].tolist() == [7]
        assert not later.query()
        torch.cuda.synchronize()


def test_the_end_of_an_epoch_waits_for_its_work(device: CudaDevice) -> None:
    with device.working():
        torch.cuda._sleep(300_000_000)  # noqa: SLF001  torch has no public kernel that only takes time
        later = torch.cuda.Event()
        later.record()
    assert later.query()


def test_times_are_on_the_clock_of_the_host(device: CudaDevice) -> None:
    with device.working():
        before = time.monotonic()
        began = device.now()
        torch.cuda._sleep(100_000_000)  # noqa: SLF001  torch has no public kernel that only takes time
        ended = device.now()
        first, last = began(), ended()
        assert before <= first < last <= time.monotonic()


def test_a_mirror_follows_its_array(device: CudaDevice) -> None:
    array = np.arange(12, dtype=np.int32).reshape(4, 3)
    with device.working():
        mirror = device.mirror(array)
        array[1], array[3] = 50, 70
        mirror.update([3], np.array([1, 3], np.int32))
        assert device.download(mirror.tensor)()[0].tolist() == array.tolist()
