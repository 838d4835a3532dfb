"""Headers of GGUF files that contradict themselves or the file are refused before anything large is allocated."""

import struct
import tracemalloc
import weakref
from pathlib import Path

import pytest

from services.checkpoint import CheckpointError
from services.checkpoint.gguf import forget_headers, read_header
from tests.unit.checkpoint.gguf_files import RawFile, entry, tensor, text

F32, Q4_0, IQ3_S = 0, 2, 21
MANY = 2**62
ARCHITECTURE = entry("general.architecture", "llama")


def array(kind: int, length: int, content: bytes = b"") -> bytes:
    return text("k") + struct.pack("<IIQ", 9, kind, length) + content


@pytest.mark.parametrize("version", [2, 3])
def test_header_is_read(version: int, tmp_path: Path) -> None:
    described = [tensor("a", (4, 2), F32, 32), tensor("b", (32, 3), Q4_0, 64)]
    numbers = array(5, 2, struct.pack("<2i", 7, -1))
    file = RawFile([ARCHITECTURE, numbers], described, bytes(32 + 32 + 54), version=version)
    header = read_header(file.write(tmp_path / "m.gguf"))
    assert header.architecture == "llama"
    assert header.numbers("k") == [7, -1]
    a, b = header.tensors.values()
    assert (a.shape, a.type.name, a.size) == ((2, 4), "F32", 32)
    assert (b.shape, b.type.name, b.size, b.begin - a.begin) == ((3, 32), "Q4_0", 54, 32)


def test_header_is_kept_until_it_is_forgotten(tmp_path: Path) -> None:
    file = RawFile([ARCHITECTURE], [tensor("a", (4, 2), F32, 0)], bytes(32)).write(tmp_path / "m.gguf")
    kept = weakref.ref(header := read_header(file))
    assert read_header(file) is header
    del header
    forget_headers()
    assert kept() is None


HOSTILE = {
    "empty": (b"", "it has 0 bytes"),
    "magic": (RawFile(magic=b"GGML", data=bytes(64)), "it begins with b'GGML'"),
    "version-1": (RawFile(version=1), "version 1; little-endian versions 2 and 3"),
    "big-endian": (RawFile(version=3 << 24), "in big-endian order"),
    "three-million-entries": (RawFile(counts=(0, 3_000_000), data=b"x"), "need at least 42000000 bytes"),
    "huge-counts": (RawFile(counts=(MANY, MANY)), "need at least"),
    "entry-missing": (RawFile(counts=(0, 2), data=bytes(32)), "a metadata entry has no key"),
    "long-key": (RawFile([struct.pack("<Q", 70_000) + bytes(80_000)]), "a string of 70000 bytes, 65535 are allowed"),
    "key-beyond-the-file": (RawFile([struct.pack("<Q", 60_000) + bytes(20)]), "60000 more bytes"),
    "string-beyond-the-file": (
        RawFile([text("k") + struct.pack("<IQ", 8, 1 << 20)]), "k has 1048576 more bytes",
    ),
    "huge-string": (RawFile([text("k") + struct.pack("<IQ", 8, MANY)]), "k has a string of"),
    "value-type": (RawFile([text("k") + struct.pack("<I", 13) + bytes(32)]), "value type 13, which does not exist"),
    "array-of-three-million": (RawFile([array(4, 3_000_000)]), "12000000 more bytes"),
    "array-of-three-million-strings": (RawFile([array(8, 3_000_000)]), "24000000 more bytes"),
    "huge-array": (RawFile([array(0, MANY)]), "elements of arrays; at most"),
    "array-of-arrays": (RawFile([array(9, 1, struct.pack("<IQ", 9, 1) * 9)]), "an array of arrays, which is not supp"),
    "array-type": (RawFile([array(77, 1, bytes(32))]), "an array of value type 77"),
    "string-in-an-array": (RawFile([array(8, 2, text("a") + struct.pack("<Q", MANY))]), "a string that ends at"),
    "not-utf-8": (RawFile([text("k") + struct.pack("<I", 8) + text(b"\xff\xfe")]), "text that is not UTF-8"),
    "entry-twice": (RawFile([ARCHITECTURE, ARCHITECTURE]), "general.architecture is there twice"),
    "alignment": (RawFile([entry("general.alignment", ("u32", 24))]), "must be a power of two from 8 to 65536"),
    "alignment-zero": (RawFile([entry("general.alignment", ("u32", 0))]), "must be a power of two"),
    "no-dimensions": (RawFile(tensors=[tensor("a", (), F32, 0)]), "has 0 dimensions"),
    "many-dimensions": (RawFile(tensors=[tensor("a", (1,) * 5, F32, 0)]), "has 5 dimensions"),
    "huge-dimensions": (RawFile(tensors=[tensor("a", (MANY, MANY), F32, 0)], data=bytes(64)), "but the file ends at"),
    "empty-tensor": (RawFile(tensors=[tensor("a", (4, 0), F32, 0)]), "tensor a is [0, 4]"),
    "half-a-block": (RawFile(tensors=[tensor("a", (48,), Q4_0, 0)], data=bytes(64)), "has blocks of 32 elements"),
    "other-type": (RawFile(tensors=[tensor("a", (256,), IQ3_S, 0)]), "has the type IQ3_S, which is not supported"),
    "unknown-type": (RawFile(tensors=[tensor("a", (256,), 99, 0)]), "has the type number 99"),
    "offset-beyond-the-file": (RawFile(tensors=[tensor("a", (4,), F32, 1 << 40)], data=bytes(64)), "but the file ends"),
    "offset-wraps": (RawFile(tensors=[tensor("a", (4,), F32, 2**64 - 32)], data=bytes(64)), "but the file ends at"),
    "offset-not-aligned": (RawFile(tensors=[tensor("a", (4,), F32, 4)], data=bytes(64)), "begins at"),
    "overlap": (
        RawFile(tensors=[tensor("a", (16,), F32, 0), tensor("b", (4,), F32, 32)], data=bytes(64)),
        "tensor b overlaps the one before it",
    ),
    "same-name": (
        RawFile(tensors=[tensor("a", (4,), F32, 0), tensor("a", (4,), F32, 32)], data=bytes(64)),
        "two tensors have the same name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_with_little_memory(case: str, tmp_path: Path) -> None:
    content, reason = HOSTILE[case]
    path = tmp_path / "model.gguf"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content.write(path)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


def test_file_that_was_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = RawFile([ARCHITECTURE, array(8, 2, text("a") + text("b"))], [tensor("a", (8,), F32, 0)], bytes(32)).write(
        tmp_path / "whole.gguf"
    )
    whole = path.read_bytes()
    read_header(path)
    for length in range(len(whole)):
        cut = tmp_path / f"{length}.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_header(cut)


def test_another_file_at_the_same_path_is_read_again(tmp_path: Path) -> None:
    path = RawFile().write(tmp_path / "m.gguf")
    assert read_header(path).architecture == "llama"
    RawFile([entry("general.architecture", "qwen2.5")]).write(path)
    assert read_header(path).architecture == "qwen2.5"
