"""Memory of the host from which a step's columns are copied to the device.

This is the host-buffer rule (docs/invariants.md): memory that is the source of a copy to the device may be rewritten
only after that copy has finished. There is one more set of memory than steps can be in flight, and each set has an
event behind the last copy that read it. So a launch does not wait for the step before it (launch without waiting).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.runner import MAX_STEPS_IN_FLIGHT

ALIGNMENT = 16
"""Bytes. Columns begin at multiples, so that vector loads of kernels are aligned."""
BLOCK = 1 << 18
"""Bytes of a new block; larger if one operation needs more."""
TORCH_TYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}
"""uint64 has the same bits as int64; torch computes with few unsigned types."""


class CopyEvent(Protocol):
    """Passes when everything enqueued before it has finished; a `torch.cuda.Event` is one."""

    def synchronize(self) -> None:
        """Wait without spinning."""


class StagingSet:
    """Staging memory of one step. Blocks are kept, so a step allocates only when it is larger than all before.

    Args:
        pinned: page-lock the memory, so that copies from it do not block.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[torch.Tensor] = []
        self._block = self._used = 0
        self._copied: CopyEvent | None = None

    def begin(self) -> None:
        """Begin a step: all memory may be written. Waits only if a copy still reads it."""
        if self._copied is not None:
            self._copied.synchronize()
        self._block = self._used = 0

    def end(self, copied: CopyEvent) -> None:
        """End the step. `copied`: behind all copies from this memory."""
        self._copied = copied

    def room(self, size: int) -> torch.Tensor:
        """Return uint8[size] that no other operation of the step has."""
        while self._block < len(self._blocks):
            block = self._blocks[self._block]
            if self._used + size <= len(block):
                room = block[self._used : self._used + size]
                self._used += size
                return room
            self._block, self._used = self._block + 1, 0
        self._blocks.append(torch.empty(max(BLOCK, size), dtype=torch.uint8, pin_memory=self._pinned))
        return self.room(size)


class PinnedStaging:
    """Staging memory of all steps in flight.

    Args:
        record: returns an event behind everything that was enqueued on the device's compute stream.
    """

    def __init__(self, record: Callable[[], CopyEvent], pinned: bool = True) -> None:
        self._record = record
        self._sets = [StagingSet(pinned) for _ in range(MAX_STEPS_IN_FLIGHT + 1)]
        self._step = 0
        """Number of the present step; 0 before the first one."""

    def begin_step(self) -> StagingSet:
        """End the step before and begin the next one."""
        if self._step:
            self._present.end(self._record())
        self._step += 1
        self._present.begin()
        return self._present

    @property
    def _present(self) -> StagingSet:
        return self._sets[self._step % len(self._sets)]

    def upload(
        self, columns: Sequence[NDArray[Any]], copy: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Copy columns to the step's memory, one behind the other, and all of them to the device.

        Args:
            copy: returns a copy of uint8[bytes] on the device.

        Returns: the columns as views of that copy.
        """
        places, size = [], 0
        for column in columns:
            places.append(slice(size, size + column.nbytes))
            size += -(-column.nbytes // ALIGNMENT) * ALIGNMENT
        staged = (self._present if self._step else self.begin_step()).room(size)
        target = staged.numpy()
        for column, place in zip(columns, places, strict=True):
            target[place].view(column.dtype)[:] = column.reshape(-1)
        whole, kinds, uploaded = copy(staged), [TORCH_TYPES[column.dtype] for column in columns], []
        views = {kind: whole.view(kind) for kind in kinds}  # one for each dtype: a view takes time
        for column, kind, place in zip(columns, kinds, places, strict=True):
            part = views[kind][place.start // kind.itemsize : place.stop // kind.itemsize]
            uploaded.append(part if column.ndim == 1 else part.view(column.shape))
        return tuple(uploaded)
