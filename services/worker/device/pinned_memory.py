"""Memory of the host from which a step's columns are copied to the device."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16
"""Bytes. Columns begin at multiples, so that vector loads of kernels are aligned."""
LEAST = 1 << 16
"""Bytes of a piece of memory. Most uploads have this size, so that they use the memory of earlier ones again."""
TORCH_TYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.bool_): torch.bool,
}
"""uint64 has the same bits as int64; torch computes with few unsigned types."""


def upload_together(
    columns: Sequence[NDArray[Any]], copy: Callable[[torch.Tensor], torch.Tensor], pinned: bool = True
) -> tuple[torch.Tensor, ...]:
    """Copy columns to memory of their own, one behind the other, and all of them to the device.

    torch gives page-locked memory to another upload when the copies from it have ended (host-buffer rule,
    docs/invariants.md), and waits for none.

    Args:
        copy: returns a copy of uint8[bytes] on the device.
        pinned: page-lock the memory, so that copies from it do not block.

    Returns: the columns as views of that copy.
    """
    places, size = [], 0
    for column in columns:
        places.append(slice(size, size + column.nbytes))
        size += -(-column.nbytes // ALIGNMENT) * ALIGNMENT
    staged = torch.empty(max(size, LEAST), dtype=torch.uint8, pin_memory=pinned)[:size]
    target = staged.numpy()
    for column, place in zip(columns, places, strict=True):
        target[place].view(column.dtype)[:] = column.reshape(-1)
    whole, kinds, uploaded = copy(staged), [TORCH_TYPES[column.dtype] for column in columns], []
    views = {kind: whole.view(kind) for kind in kinds}  # one for each dtype: a view takes time
    for column, kind, place in zip(columns, kinds, places, strict=True):
        part = views[kind][place.start // kind.itemsize : place.stop // kind.itemsize]
        uploaded.append(part if column.ndim == 1 else part.view(column.shape))
    return tuple(uploaded)
