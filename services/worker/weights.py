"""A checkpoint's tensors: read one at a time from its safetensors files, checked against the shape they must have.

A rank that needs a part of a tensor reads that part and nothing else.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.checkpoint import WEIGHT_FILES, CheckpointError, resolve
from services.config import WorkerConfig
from services.worker.runner import LoadError

DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}
Cut = tuple[slice, ...]
"""Which rows (and columns) of a tensor; `()` is all of it."""


def located(config: WorkerConfig) -> Path:
    """Where the files of the worker's model are. Raises: LoadError"""
    try:
        return resolve(config.model, config.revision, WEIGHT_FILES)
    except CheckpointError as error:
        raise LoadError(str(error)) from error


class Checkpoint:
    """The tensors of a directory. Files are mapped, not read, until a tensor is taken.

    Raises:
        LoadError: no safetensors files, a file is missing or broken.
    """

    def __init__(self, directory: Path) -> None:
        opened = [_open(path) for path in _shards(directory)]
        self.files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        """The open file of each tensor, by the tensor's name."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, cut: Cut = ()) -> torch.Tensor:
        """The part `cut` of the tensor `name`, which has `shape` as a whole, converted to `dtype`.

        Raises:
            LoadError: it is missing, of another shape, or not of floating-point numbers.
        """
        file = self.files.get(name)
        if file is None:
            raise LoadError(
                f"the checkpoint has no tensor {name}; download the model again, all of its files"
            )
        view = file.get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise LoadError(
                f"tensor {name} is {view.get_shape()}, but config.json says {list(shape)}; "
                "the files do not belong together"
            )
        if view.get_dtype() not in DTYPES:
            raise LoadError(
                f"tensor {name} is {view.get_dtype()}; quantised weights are not supported, use bfloat16 or float32"
            )
        return view[cut or (slice(None),)].to(dtype)

    def integers(self, name: str) -> torch.Tensor:
        """int64, one-dimensional: the whole tensor. Raises: LoadError, when it is missing, or has no whole numbers."""
        if name not in self:
            raise LoadError(
                f"the checkpoint has no tensor {name}; download the model again, all of its files"
            )
        values: torch.Tensor = self.files[name].get_tensor(name)
        if values.ndim != 1 or values.is_floating_point() or values.is_complex():
            raise LoadError(f"tensor {name} must be a list of whole numbers; download the model again")
        return values.long()

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def digest(self, config: bytes) -> str:
        """SHA-256 over config.json and every tensor's name, shape and type: ranks of one group must agree on it."""
        digest = hashlib.sha256(config)
        for name in sorted(self.files):
            view = self.files[name].get_slice(name)
            digest.update(f"{name} {view.get_shape()} {view.get_dtype()}\n".encode())
        return digest.hexdigest()


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            old = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
            remedy = (
                "convert its .bin files, which can run code when loaded"
                if old
                else "download the model again"
            )
            raise LoadError(f"{directory} has no safetensors files; {remedy}")
        single = directory / "model.safetensors"
        return [single] if single in paths else paths
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise LoadError(f"{index} cannot be read; download the model again") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise LoadError(f"{directory} has no {name}, which its index names; download the model again")
    return [directory / name for name in names]


def _open(path: Path):  # type: ignore[no-untyped-def]
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise LoadError(
            f"{path} is not a valid safetensors file ({error}); download the model again"
        ) from error
