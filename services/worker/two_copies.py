"""A value in memory that outlives its process, which may be killed at any byte of a write."""

import struct
import zlib

_ENTRY = struct.Struct("<QQI")
"""Number of the write, bytes of the value, CRC-32 of both and of the value."""
_UNCHECKED = struct.Struct("<QQ")


class TwoCopies:
    """The last value that was written as a whole: each write replaces the older one of two copies.

    Args:
        memory: half of it for each copy. Zeros have no value.
    """

    def __init__(self, memory: memoryview) -> None:
        half = len(memory) // 2
        self._copies = memory[:half], memory[half : 2 * half]
        self.most = half - _ENTRY.size
        """Bytes of the longest value."""

    def read(self) -> bytes:
        """Return the value; b"": there is none."""
        return max(map(_read, self._copies))[1]

    def write(self, value: bytes) -> None:
        """Raises: ValueError, if there is no room; the value of before stays"""
        if len(value) > self.most:
            raise ValueError(f"{len(value)} bytes of at most {self.most}")
        numbers = [_read(copy)[0] for copy in self._copies]
        into, entry = self._copies[numbers.index(min(numbers))], _UNCHECKED.pack(max(numbers) + 1, len(value))
        into[_ENTRY.size : _ENTRY.size + len(value)] = value
        into[: _ENTRY.size] = entry + zlib.crc32(value, zlib.crc32(entry)).to_bytes(4, "little")


def _read(copy: memoryview) -> tuple[int, bytes]:
    """Return the number and the value of a copy; (0, b""): it was not written as a whole."""
    number, size, check = _ENTRY.unpack_from(copy)
    value = bytes(copy[_ENTRY.size : _ENTRY.size + size])
    is_whole = len(value) == size and zlib.crc32(value, zlib.crc32(copy[: _UNCHECKED.size])) == check
    return (number, value) if is_whole else (0, b"")
