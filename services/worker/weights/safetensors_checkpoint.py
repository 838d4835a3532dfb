"""Tensors of a checkpoint in Hugging Face format: read one at a time from its safetensors files, and checked against
the expected shape."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.checkpoint import weight_shards
from services.worker.kernels.quantized_weight import BlockRows
from services.worker.runner import LoadError
from services.worker.weights.checkpoint import Cut, check_shape, missing_tensor, raw_bytes, sampled_rows

DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}
"""Dtypes of safetensors that can be read, and their bytes."""


class SafetensorsCheckpoint:
    """A `Checkpoint`: the tensors of a directory. Files are mapped; a tensor is read when it is requested.

    Raises: LoadError or CheckpointError, when there are no safetensors files, or one is missing or broken.
    """

    def __init__(self, directory: Path) -> None:
        opened = [_open(path) for path in weight_shards(directory)]
        self.files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        """The open file of each tensor, by the tensor's name."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut = ()) -> torch.Tensor:
        file = self.files.get(name)
        if file is None:
            raise missing_tensor(name)
        view = file.get_slice(name)
        check_shape(name, tuple(view.get_shape()), shape)
        if view.get_dtype() not in DTYPES:
            raise LoadError(
                f"tensor {name} is {view.get_dtype()}; quantised weights are not supported, use bfloat16 or float32"
            )
        return view[cut or (slice(None),)].to(dtype)

    def integers(self, name: str) -> torch.Tensor:
        if name not in self:
            raise missing_tensor(name)
        values: torch.Tensor = self.files[name].get_tensor(name)
        if values.ndim != 1 or values.is_floating_point() or values.is_complex():
            raise LoadError(f"tensor {name} must be a list of whole numbers; download the model again")
        return values.long()

    def blocks(self, name: str, shape: tuple[int, ...], cut: Cut = ()) -> BlockRows | None:
        """Return None: the files have no quantised tensors."""
        return None

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def digest(self, config: bytes) -> str:
        digest = hashlib.sha256(config)
        for name in sorted(self.files):
            view = self.files[name].get_slice(name)
            shape = view.get_shape()
            digest.update(f"{name} {shape} {view.get_dtype()}\n".encode())
            for rows in sampled_rows(shape):
                digest.update(raw_bytes(view[rows]))
        return digest.hexdigest()


def _open(path: Path):  # type: ignore[no-untyped-def]
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise LoadError(f"{path} is not a valid safetensors file ({error}); download the model again") from error
