"""Kernels of a device that are called with tensors of the host, so that tests of the host's tensors run on the device.

Every tensor of a call is copied to the device with the whole memory that it is a view of: strides, and tensors that
share memory, stay as they are. After the call that memory is copied back.
"""

from collections.abc import Callable
from typing import Any

import torch

from services.worker.device.cuda import CudaDevice
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cuda.kernels import CudaKernels
from services.worker.kernels.interface.kernels import Kernels


class MovedMemory:
    """Memory of the host during one call, and its copy on the device."""

    def __init__(self, where: torch.device) -> None:
        self._where = where
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By address: the memory as one row of items, and its copy."""

    def to_device(self, value: Any) -> Any:
        """Return the value with its tensors on the device."""
        if isinstance(value, OnHost):
            return value.inner
        if isinstance(value, tuple):
            items = map(self.to_device, value)
            return type(value)(*items) if type(value) is not tuple else tuple(items)
        if not isinstance(value, torch.Tensor) or value.device == self._where:
            return value
        _, copy = self._copy_of(value)
        return copy.as_strided(value.size(), value.stride(), value.storage_offset())

    def to_host(self, value: Any) -> Any:
        """Return a result with its tensors on the host: in the caller's own memory, if it is a view of that."""
        if isinstance(value, tuple):
            items = map(self.to_host, value)
            return type(value)(*items) if type(value) is not tuple else tuple(items)
        if isinstance(value, torch.Tensor):
            for whole, copy in self._copies.values():
                if copy.untyped_storage().data_ptr() == value.untyped_storage().data_ptr():
                    return whole.as_strided(value.size(), value.stride(), value.storage_offset())
            return value.cpu()
        return value

    def copy_back(self) -> None:
        for whole, copy in self._copies.values():
            whole.copy_(copy)

    def _copy_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        storage = tensor.untyped_storage()
        if (known := self._copies.get(storage.data_ptr())) is None:
            whole = torch.empty(0, dtype=tensor.dtype).set_(storage)
            known = self._copies[storage.data_ptr()] = whole, whole.to(self._where, copy=True)
        return known


class OnHost:
    """An object of the device whose methods take and return tensors of the host."""

    def __init__(self, inner: Any, device: ComputeDevice) -> None:
        self.inner, self._device = inner, device

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return self._moving(value) if callable(value) else value

    def __call__(self, *arguments: Any) -> Any:
        return self._moving(self.inner)(*arguments)

    def _moving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            memory = MovedMemory(self._device.where)
            with self._device.working():  # downloads wait for the work of its stream only
                result = function(*map(memory.to_device, arguments))
                memory.copy_back()
                result = memory.to_host(result)
            is_part = type(result).__module__.startswith("services.worker.kernels.cuda")
            return OnHost(result, self._device) if is_part else result

        return call


class HostKernels:
    """`Kernels` of a device for tensors of the host. The KV cache is the device's."""

    def __init__(self, kernels: Kernels) -> None:
        device = kernels.device
        self.network = OnHost(kernels.network, device)
        self.rows, self.sampling = OnHost(kernels.rows, device), OnHost(kernels.sampling, device)
        self.drafting = OnHost(kernels.drafting, device)


def gpu_kernels(dtype: torch.dtype = torch.float32, device: ComputeDevice | None = None) -> HostKernels:
    """Return the kernels that serve on a GPU, for tensors of the host."""
    return HostKernels(CudaKernels(dtype, device or CudaDevice(), eager=True))
