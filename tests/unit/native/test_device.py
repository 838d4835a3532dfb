"""Memory, copies and times of devices; the device is SIMULATED (lazy_device.py)."""

import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from services.worker.device.cuda import CudaDevice
from services.worker.device.device_times import DeviceClock
from services.worker.device.interface import ComputeDevice
from tests.unit.native.lazy_device import POISON, LazyDevice

COLUMNS = (
    np.arange(5, dtype=np.int32),
    np.array([2**64 - 1, 3], np.uint64),
    np.zeros(0, np.int32),
    np.array([[1.5, 2.5, -1.0]], np.float32),
    np.array([True, False, True]),
)


@pytest.mark.parametrize("device", [ComputeDevice(), LazyDevice(), LazyDevice(frozenset({"compute"}))])
def test_columns_arrive_with_their_shapes(device: ComputeDevice) -> None:
    uploaded = device.upload(*COLUMNS)
    for column, array in zip(COLUMNS, device.download(*uploaded)(), strict=True):
        assert array.shape == column.shape
        assert array.view(column.dtype).tolist() == column.tolist()


def test_a_lazy_upload_runs_when_somebody_waits() -> None:
    device = LazyDevice()
    (uploaded,) = device.upload(np.array([7], np.int32))
    assert uploaded.tolist() != [7]
    device.now()()
    assert uploaded.tolist() == [7]


def test_the_source_of_an_upload_may_change_afterwards() -> None:
    device, column = LazyDevice(), np.array([7], np.int32)
    (uploaded,) = device.upload(column)
    column[0] = 8
    assert device.download(uploaded)()[0].tolist() == [7]
    assert not device.hazards


def test_the_source_of_a_download_is_kept() -> None:
    for keeps in (True, False):  # False is a planted fault, which is found
        device = LazyDevice(frozenset({"compute"}), keeps=keeps)
        (uploaded,) = device.upload(np.array([7], np.int32))
        copy = device.download(uploaded)
        del uploaded
        gc.collect()
        assert (copy()[0].tolist() == [7]) == keeps
        assert bool(device.hazards) != keeps


def test_a_download_contains_poison_until_it_has_run() -> None:
    device = LazyDevice()
    (uploaded,) = device.upload(np.array([7], np.int32))
    copy = device.download(uploaded)
    assert uploaded.tolist() != [7]
    assert copy()[0].tolist() == [7]
    assert torch.full((1,), POISON, dtype=torch.int32).tolist() == [POISON]


@pytest.mark.parametrize("device", [ComputeDevice(), LazyDevice()])
def test_a_mirror_follows_its_array(device: ComputeDevice) -> None:
    array = np.arange(12, dtype=np.int32).reshape(4, 3)
    mirror = device.mirror(array)
    array[1], array[3] = 50, 70
    mirror.update([3], np.array([1, 3], np.int32))
    mirror.update([], np.zeros(0, np.int32))
    assert device.download(mirror.tensor)()[0].tolist() == array.tolist()


def test_the_work_of_an_epoch_has_run_when_its_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would give the memory of the epoch away while kernels still write it."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda where: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda where: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: calls.append("wait"))
    with CudaDevice().working():
        calls.append("work")
    assert calls == ["wait", "work", "wait"]


class StepEvent:
    """An event at a time of a device's clock, in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at, self.waited = at, False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end_event: "StepEvent", /) -> float:
        return end_event.at - self.at


def test_times_of_a_device_are_on_the_clock_of_the_host() -> None:
    now = 100.0
    clock = DeviceClock(lambda: now)
    assert clock.seconds(StepEvent(5000.0), known=99.5) == 99.5
    assert clock.seconds(last := StepEvent(5250.0), known=None) == pytest.approx(99.75)
    assert last.waited
    assert clock.seconds(StepEvent(5900.0), known=None) == now  # its clock is fast
    assert clock.seconds(StepEvent(9000.0), known=103.0) == 103.0  # idle in between
