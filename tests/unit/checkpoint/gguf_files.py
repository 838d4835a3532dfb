"""GGUF files for tests, byte by byte, so that a field can be wrong."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CODES = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str, value: str | tuple[str, Any]) -> bytes:
    """A metadata entry: a text, or (type, number)."""
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    number, code = _CODES[value[0]]
    return text(key) + struct.pack("<I", number) + struct.pack(code, value[1])


def tensor(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    """A description; `shape` is in the order of the file, the contiguous dimension first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


@dataclass
class RawFile:
    entries: list[bytes] = field(default_factory=lambda: [entry("general.architecture", "llama")])
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int, int] | None = None
    """Claimed numbers of tensors and entries; None: the true ones."""

    def write(self, path: Path) -> Path:
        counts = self.counts or (len(self.tensors), len(self.entries))
        header = self.magic + struct.pack("<IQQ", self.version, *counts)
        header += b"".join(self.entries) + b"".join(self.tensors)
        path.write_bytes(header + bytes(-len(header) % 32) + self.data)
        return path
