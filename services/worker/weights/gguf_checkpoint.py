"""Tensors of a GGUF file under their Hugging Face names, dequantised or in their blocks.

The file is mapped, and only the requested part of a tensor is read.
"""

import hashlib
import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from services.checkpoint.gguf import GgufHeader, GgufTensor, architecture, head_size, read_header, tensors_by_name
from services.checkpoint.gguf.tensor_types import TensorType
from services.worker.kernels.quantized_weight import BlockRows
from services.worker.runner import LoadError
from services.worker.weights.checkpoint import Cut, check_shape, missing_tensor, sampled_rows

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""
_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj\.(?:weight|bias)")
"""Projections whose rows the converter of Llama models reorders."""
_CHUNK_ELEMENTS = 1 << 18
"""Elements that are dequantised at a time, so that temporary arrays stay small."""


class GgufCheckpoint:
    """A `Checkpoint`. Raises: CheckpointError, when the file is broken or has tensors that are not supported."""

    def __init__(self, path: Path) -> None:
        self._header: GgufHeader = read_header(path)
        self._tensors = tensors_by_name(self._header)
        # Copy on write: torch accepts the array without a warning, and nothing reaches the file.
        self._data: NDArray[np.uint8] = np.memmap(path, np.uint8, "c")

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut = ()) -> torch.Tensor:
        tensor = self._tensor(name, shape)
        rows, columns = _slices(tensor, cut)
        stored = self._rows(name, tensor, rows)
        if not tensor.type.is_quantised:
            values = torch.from_numpy(stored).view(_PLAIN[tensor.type.name])[:, columns].to(dtype)
        else:
            values = _dequantised(tensor.type, torch.from_numpy(stored), columns, dtype)
        if len(tensor.shape) > 1:
            return values
        offset = architecture(self._header).norm_offset if name.endswith("norm.weight") else 0.0
        return values.reshape(-1) - offset if offset else values.reshape(-1)

    def blocks(self, name: str, shape: tuple[int, ...], cut: Cut = ()) -> BlockRows | None:
        tensor = self._tensor(name, shape)
        rows, columns = _slices(tensor, cut)
        elements, size = tensor.type.block_elements, tensor.type.block_bytes
        if not tensor.type.is_quantised or columns.start % elements or columns.stop % elements:
            return None
        stored = torch.from_numpy(self._rows(name, tensor, rows))
        part = slice(columns.start // elements * size, columns.stop // elements * size)
        return BlockRows(tensor.type.name, stored[:, part])

    def integers(self, name: str) -> torch.Tensor:
        if name not in self:
            raise missing_tensor(name)
        raise LoadError(f"tensor {name} must be a list of whole numbers; convert the model again")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def digest(self, config: bytes) -> str:
        digest = hashlib.sha256(config)
        for name, tensor in sorted(self._tensors.items()):
            digest.update(f"{name} {list(tensor.shape)} {tensor.type.name}\n".encode())
            for rows in sampled_rows(tensor.shape):
                digest.update(self._rows(name, tensor, rows).tobytes())
        return digest.hexdigest()

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise missing_tensor(name)
        check_shape(name, tensor.shape, shape)
        if len(shape) > 2:
            raise LoadError(f"tensor {name} has {len(shape)} dimensions; matrices and vectors are supported")
        return tensor

    def _rows(self, name: str, tensor: GgufTensor, rows: slice) -> NDArray[np.uint8]:
        """uint8[rows, bytes of a row], in the order of Hugging Face checkpoints."""
        stored = self._data[tensor.begin : tensor.begin + tensor.size]
        if (order := self._order(name, tensor)) is None:
            return stored.reshape(-1, tensor.row_bytes)[rows]
        if len(tensor.shape) == 1:
            width = tensor.row_bytes // tensor.shape[0]
            return stored.reshape(-1, width)[order].reshape(1, -1)
        return stored.reshape(-1, tensor.row_bytes)[order[rows]]

    def _order(self, name: str, tensor: GgufTensor) -> NDArray[np.int64] | None:
        """Return the row of the file for each row of the tensor, None if they are the same.

        In files of Llama and similar models, the rows of a head's two halves alternate: they are rotated in pairs.
        """
        if not architecture(self._header).reorders or not _ROTATED.fullmatch(name):
            return None
        outputs, size = tensor.shape[0], head_size(self._header)
        if outputs % size or size % 2:
            raise LoadError(f"tensor {name} has {outputs} outputs, which are no heads of {size}")
        return np.arange(outputs).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)


def _slices(tensor: GgufTensor, cut: Cut) -> tuple[slice, slice]:
    """Return the rows and the columns of a cut; a vector is one row."""
    if len(tensor.shape) == 1:
        rows, columns = slice(0, 1), cut[0] if cut else slice(None)
    else:
        rows, columns = (*cut, slice(None), slice(None))[:2]
    begin, end, _ = columns.indices(tensor.shape[-1])
    return rows, slice(begin, end)


def _dequantised(kind: TensorType, stored: torch.Tensor, columns: slice, dtype: torch.dtype) -> torch.Tensor:
    """Return dtype[rows, columns]. The values are computed in float32."""
    elements, size = kind.block_elements, kind.block_bytes
    first, last = columns.start // elements, -(-columns.stop // elements)
    inside = slice(columns.start - first * elements, columns.stop - first * elements)
    values = torch.empty((len(stored), columns.stop - columns.start), dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // max(1, (last - first) * elements))
    for begin in range(0, len(stored), step):
        part = BlockRows(kind.name, stored[begin : begin + step, first * size : last * size])
        values[begin : begin + step] = part.dequantized()[:, inside]
    return values
