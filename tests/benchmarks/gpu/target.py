"""A GPU to measure on, or a tiny SIMULATED device, on which CI runs the same code."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from services.config import WorkerConfig
from services.worker.backends.native.runner import NativeRunner
from services.worker.device.interface import ComputeDevice
from services.worker.kernels import selection
from services.worker.kernels.interface.kernels import Kernels
from tests.benchmarks.gpu.shapes import TINY_SERVED
from tests.benchmarks.gpu.waits import WaitedEvent


@dataclass(frozen=True)
class ServedLoad:
    """Requests of equal length that begin together, and the server that they are sent to."""

    model: str
    batch: int
    prompt: int
    output: int
    flags: tuple[str, ...]
    """Flags of the server: its device."""


@dataclass(frozen=True)
class MeasuredDevice:
    """A device, and sizes that fit it."""

    name: str
    make: Callable[[torch.dtype], Kernels]
    """Makes kernels on the device for weights of this dtype."""
    runner: Callable[[WorkerConfig], NativeRunner]
    """Makes a runner on the device."""
    settings: Mapping[str, Any]
    """Settings of its worker."""
    dtype: torch.dtype
    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    prompt: int
    steps: int
    """Decode steps that are measured."""
    warm: int
    """Decode steps before."""
    prefill: int
    matrix: int
    """Rows and columns of the measured product."""
    copied: int
    """Bytes of the measured copy."""
    event: type[WaitedEvent]
    """Class of the device's events."""
    served: ServedLoad
    properties: Mapping[str, object] = field(default_factory=dict)

    def seconds(self, device: ComputeDevice, work: Callable[[], object], repeats: int) -> float:
        """Return the shortest time of `work` on the device, of some repeats."""
        best = float("inf")
        for _ in range(repeats):
            began = device.now()
            device.launch(work)
            ended = device.now()
            first = began()
            best = min(best, ended() - first)
        return best


def gpu() -> MeasuredDevice:
    """Raises: RuntimeError, without a GPU"""
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU; --tiny runs the same parts on a simulated device")
    properties = torch.cuda.get_device_properties(0)

    def make(dtype: torch.dtype) -> Kernels:
        features = selection.device_features("cuda")
        return selection.create(selection.choose("auto", "cuda", dtype, features))

    return MeasuredDevice(
        name=properties.name,
        make=make,
        runner=NativeRunner,
        settings={"device": "cuda"},
        dtype=torch.bfloat16,
        shapes=("llama-3.2-1b", "llama-3.1-8b"),
        batches=(1, 64, 256),
        prompt=128,
        steps=200,
        warm=30,
        prefill=8192,
        matrix=8192,
        copied=4 << 30,
        event=torch.cuda.Event,
        served=ServedLoad("llama-3.1-8b", 64, 128, 256, ("--device", "cuda")),
        properties={
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "float32_products": torch.get_float32_matmul_precision(),
            "date": time.strftime("%Y-%m-%d"),
        },
    )


def tiny() -> MeasuredDevice:
    """A simulated device: its times are numbers of operations, not seconds."""
    from tests.unit.native.lazy_device import LazyDevice, LazyEvent
    from tests.unit.native.lazy_kernels import LazyKernels

    return MeasuredDevice(
        name="SIMULATED",
        make=lambda dtype: LazyKernels(dtype, LazyDevice()),
        runner=lambda config: NativeRunner(
            config, create_kernels=lambda choice: LazyKernels(choice.activations, LazyDevice())
        ),
        settings={"kernels": "reference", "threads": 1},
        dtype=torch.float32,
        shapes=("tiny",),
        batches=(1, 3),
        prompt=9,
        steps=5,
        warm=1,
        prefill=64,
        matrix=8,
        copied=1 << 12,
        event=LazyEvent,
        served=ServedLoad(TINY_SERVED, 2, 9, 5, ("--device", "cpu", "--kernels", "reference", "--threads", "1")),
    )
