"""Typed reads from a GGUF header. Lengths are checked against the rest of the file before memory is allocated."""

import mmap
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.checkpoint.errors import BrokenFileError, CheckpointError

SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""`struct` codes of the value types that have a fixed size."""
STRING, ARRAY = 8, 9
MAX_ARRAY_ELEMENTS = 8_000_000
"""Maximum number of elements in all arrays of a header. A vocabulary of 256,000 tokens has about 1,300,000."""
MAX_HEADER_STRING = 64 * 1024 * 1024
"""Maximum length of a string, bytes."""
_LENGTH = struct.Struct("<Q")

Value = int | float | bool | str | list[str] | NDArray[Any]


class Cursor:
    """A position in a mapped file. The methods raise BrokenFileError if the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size = data, len(data)
        self._elements = 0
        self.position = 0

    @property
    def remaining(self) -> int:
        return self._size - self.position

    def unpack(self, code: str) -> Any:
        """Return one little-endian number with the `struct` code `code`."""
        size = struct.calcsize("<" + code)
        self.require(size)
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += size
        return value

    def string(self, limit: int = MAX_HEADER_STRING) -> str:
        """Return a string of at most `limit` bytes."""
        length = self.unpack("Q")
        if length > limit:
            raise BrokenFileError(f"a string of {length} bytes, {limit} are allowed")
        self.require(length)
        begin, self.position = self.position, self.position + length
        return _text(self._data[begin : self.position])

    def value(self, kind: int) -> Value:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise BrokenFileError(f"value type {kind}, which does not exist")
        value: int | float | bool = self.unpack(SCALARS[kind])
        return value

    def require(self, size: int) -> None:
        """Raises: BrokenFileError, if fewer than `size` bytes are left."""
        if size > self.remaining:
            raise BrokenFileError(f"{size} more bytes at {self.position}, but the file ends at {self._size}")

    def _array(self) -> list[str] | NDArray[Any]:
        kind, length = self.unpack("I"), self.unpack("Q")
        if kind == ARRAY:
            raise CheckpointError("an array of arrays, which is not supported")
        if kind != STRING and kind not in SCALARS:
            raise BrokenFileError(f"an array of value type {kind}, which does not exist")
        self._elements += length
        if self._elements > MAX_ARRAY_ELEMENTS:
            raise BrokenFileError(f"{self._elements} elements of arrays; at most {MAX_ARRAY_ELEMENTS} are read")
        if kind == STRING:
            self.require(length * _LENGTH.size)
            return self._strings(length)
        dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
        self.require(length * dtype.itemsize)
        values = np.frombuffer(self._data, dtype, length, self.position).copy()
        self.position += length * dtype.itemsize
        return values

    def _strings(self, count: int) -> list[str]:
        """Read an array without a call per string: a vocabulary and its merges have 100,000 strings and more."""
        data, size, position, length_at = self._data, self._size, self.position, _LENGTH.unpack_from
        strings: list[str] = []
        for _ in range(count):
            begin = position + 8
            if begin > size:
                raise BrokenFileError(f"a string at {position}, but the file ends at {size}")
            position = begin + length_at(data, position)[0]
            if position > size:
                raise BrokenFileError(f"a string that ends at {position}, but the file ends at {size}")
            strings.append(_text(data[begin:position]))
        self.position = position
        return strings


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BrokenFileError(f"text that is not UTF-8: {data[:40]!r}") from None
