"""Header of a GGUF file: metadata and the positions of the tensors, checked against the size of the file.

Source of the layout: the specification of GGUF in ggml's documentation, versions 2 and 3.
"""

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from services.checkpoint.errors import BrokenFileError, CheckpointError
from services.checkpoint.gguf.cursor import Cursor, Value
from services.checkpoint.gguf.tensor_types import OTHER_TYPES, SUPPORTED, TENSOR_TYPES, TensorType
from services.checkpoint.location import check_pointer

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_KEY, _MAX_NAME, _MAX_DIMENSIONS = 65_535, 256, 4
_LEAST_ENTRY = 8 + 1 + 4 + 1
"""Bytes of the shortest metadata entry: length and text of its key, type, value."""
_LEAST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
"""Bytes of the shortest description of a tensor: length and text of its name, dimensions, type, offset."""
_MAX_ALIGNMENT = 65_536


@dataclass(frozen=True)
class GgufTensor:
    """Position and shape of a tensor."""

    name: str
    shape: tuple[int, ...]
    """As in torch: the last dimension is contiguous."""
    type: TensorType
    begin: int
    """Offset of the first byte in the file."""

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block_elements * self.type.block_bytes

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    # Values of one kind. They raise CheckpointError, if the value is missing without a default, or of another kind.

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._checked(key, default, str, "text"))

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._checked(key, default, int, "a whole number"))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._checked(key, default, (int, float), "a number"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._checked(key, default, bool, "true or false"))

    def texts(self, key: str) -> list[str]:
        """Return an array, [] if it is missing."""
        found: list[str] = self._checked(key, [], list, "an array of texts")  # as it is: vocabularies are large
        return found

    def numbers(self, key: str) -> list[Any]:
        """Return an array, [] if it is missing."""
        found: list[Any] = self._checked(key, np.zeros(0), np.ndarray, "an array of numbers").tolist()
        return found

    def _checked(self, key: str, default: object, kind: type | tuple[type, ...], wanted: str) -> Any:
        value = self.metadata.get(key, default)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
        found = "is missing" if value is None else f"must be {wanted}, it is {value!r:.80}"
        raise CheckpointError(f"{self.path}: {key} {found}; convert the model again")


def read_header(path: Path) -> GgufHeader:
    """Return the header of a file; the same object while the file does not change.

    Raises: CheckpointError
    """
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return _read(path, status.st_size, status.st_mtime_ns)


def forget_headers() -> None:
    """Free the headers that were read, which hold every token of a vocabulary; they are read again when needed."""
    _read.cache_clear()


@lru_cache(maxsize=4)
def _read(path: Path, size: int, _mtime: int) -> GgufHeader:
    check_pointer(path)
    if size < len(MAGIC) + 4 + 8 + 8:
        raise CheckpointError(f"{path} is not a GGUF file: it has {size} bytes; download it again")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    except BrokenFileError as error:
        raise CheckpointError(f"{path} is not a valid GGUF file: {error}; download it again") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = Cursor(data)
    if data[: len(MAGIC)] != MAGIC:
        raise BrokenFileError(f"it begins with {data[: len(MAGIC)]!r}, not with {MAGIC!r}")
    cursor.position = len(MAGIC)
    version = cursor.unpack("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        order = ", in big-endian order" if swapped in VERSIONS else ""
        raise CheckpointError(f"version {version}{order}; little-endian versions 2 and 3 are supported")
    num_tensors, num_entries = cursor.unpack("Q"), cursor.unpack("Q")
    least = num_tensors * _LEAST_TENSOR + num_entries * _LEAST_ENTRY
    if least > cursor.remaining:
        raise BrokenFileError(
            f"{num_tensors} tensors and {num_entries} metadata entries need at least {least} bytes, "
            f"but {cursor.remaining} follow"
        )
    metadata = _metadata(cursor, num_entries)
    described = [_description(cursor) for _ in range(num_tensors)]
    alignment = _alignment(metadata)
    begin = -(-cursor.position // alignment) * alignment
    tensors = [GgufTensor(name, shape, kind, begin + at) for name, shape, kind, at in described]
    _check_places(tensors, begin, alignment, len(data))
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise BrokenFileError("two tensors have the same name")
    return GgufHeader(path, metadata, by_name)


def _metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.string(_MAX_KEY)
        if not key or key in metadata:
            raise BrokenFileError(f"{key:.80} is there twice" if key else "a metadata entry has no key")
        kind = cursor.unpack("I")
        try:
            metadata[key] = cursor.value(kind)
        except CheckpointError as error:
            raise type(error)(f"{key:.80} has {error}") from None
    return metadata


def _description(cursor: Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
    """Return name, shape, type, and offset from the begin of the data."""
    name, dimensions = cursor.string(_MAX_NAME), cursor.unpack("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise BrokenFileError(f"tensor {name:.80} has {dimensions} dimensions; 1 to {_MAX_DIMENSIONS} exist")
    shape = tuple(reversed([cursor.unpack("Q") for _ in range(dimensions)]))
    number, offset = cursor.unpack("I"), cursor.unpack("Q")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        other = OTHER_TYPES.get(number, f"number {number}")
        raise CheckpointError(f"tensor {name:.80} has the type {other}, which is not supported; use one of {SUPPORTED}")
    if min(shape) < 1 or shape[-1] % kind.block_elements:
        raise BrokenFileError(
            f"tensor {name:.80} is {list(shape)}, but {kind.name} has blocks of {kind.block_elements} elements"
        )
    return name, shape, kind, offset


def _alignment(metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise BrokenFileError(
            f"general.alignment must be a power of two from 8 to {_MAX_ALIGNMENT}, it is {value!r:.80}"
        )
    return value


def _check_places(tensors: Iterable[GgufTensor], begin: int, alignment: int, size: int) -> None:
    """Raises: BrokenFileError, if a tensor is not aligned, overlaps another one, or exceeds the file."""
    end = begin
    for tensor in sorted(tensors, key=lambda each: each.begin):
        if tensor.begin % alignment:
            raise BrokenFileError(f"tensor {tensor.name:.80} begins at {tensor.begin}, not at {alignment} n")
        if tensor.begin < end:
            raise BrokenFileError(f"tensor {tensor.name:.80} overlaps the one before it")
        end = tensor.begin + tensor.size
        if end > size:
            raise BrokenFileError(f"tensor {tensor.name:.80} ends at {end}, but the file ends at {size}")
