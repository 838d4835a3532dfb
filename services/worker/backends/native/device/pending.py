"""Data that a device and the host both have, for devices with memory of their own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.device.interface import I32, ComputeDevice
from services.worker.batch.staging import CopyEvent


class CopyOnItsWay:
    """`HostCopy` that has arrived when an event has passed.

    Args:
        copies: on the host; the result's arrays are views of them.
        sources: on the device, kept until the copy has run.
    """

    def __init__(
        self, event: CopyEvent, copies: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        self._event, self._copies, self._sources = event, copies, [*sources]

    def get(self) -> tuple[NDArray[Any], ...]:
        self._event.synchronize()
        self._sources.clear()
        return tuple(copy.numpy() for copy in self._copies)


class UploadedMirror:
    """`DeviceMirror` that uploads changed rows."""

    def __init__(self, device: ComputeDevice, array: NDArray[Any]) -> None:
        self._device, self._array = device, array
        self.tensor = torch.from_numpy(array.copy()).to(device.where)

    def update(self, *rows: I32 | Sequence[int]) -> None:
        if any(map(len, rows)):
            changed = np.unique(np.concatenate([np.asarray(each, np.int64) for each in rows]))
            index, values = self._device.upload(changed, self._array[changed])
            self._device.launch(lambda: self.tensor.index_copy_(0, index, values))
