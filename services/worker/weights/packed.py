"""Files of packed weights in a private directory, so that a worker that starts again neither hashes nor packs its
checkpoint.

    DIR/NAME.packed    data of each array; header (JSON); trailer

NAME is of the model and of what it is loaded for, so other weights at the same path replace the file. The header has
everything that the packed weights depend on (`identity`); a file with another one counts as missing, as does one that
is torn or damaged. A process may be killed at any byte: a file is written under another name and renamed. The files
that were used last stay.
"""

import fcntl
import logging
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from errno import EINTR, ENOSPC
from math import prod
from pathlib import Path
from shutil import disk_usage
from threading import Event, Thread
from typing import BinaryIO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from services.checkpoint import CheckpointError
from services.private import check_private, make_private
from services.units import size_text
from services.worker.kernels.packed_weight import Packed, PackedRows, PackedWeight
from services.worker.runner import Progress
from services.worker.weights.contents import Contents

log = logging.getLogger("runahead.worker")

_TRAILER = struct.Struct("<QI8s")
"""Bytes of the header, CRC-32 of the header, format and version."""
_MAGIC = b"RUNAPW1\n"
_ALIGNMENT = 4096
_CHUNK_WORDS = 2 << 20
"""64-bit words that are written before the writer looks whether it must end."""
SUFFIX, TEMPORARY = ".packed", ".writing-"
LEFT_BEHIND_SECONDS = 600.0
"""Age at which a file that is being written has lost its writer."""


class _Array(msgspec.Struct):
    layout: str
    outputs: int
    inputs: int
    dtype: str
    shape: list[int]
    begin: int
    """Offset in the file, a multiple of `_ALIGNMENT`."""
    checksum: int
    """Sum of the 64-bit words. It is made in the time of reading the memory once."""


class _Header(msgspec.Struct):
    identity: str
    contents: dict[str, str]
    types: list[str]
    size: int
    """Bytes in front of the header."""
    weights: dict[str, list[_Array]]


class PackedWeights:
    """Packed weights of a rank by name: those of a file, and those that were made since."""

    def __init__(self) -> None:
        self.contents: dict[str, str] = {}
        """Digest of each part of the checkpoint from which those of the file were made."""
        self.types: set[str] = set()
        """Types of the checkpoint's weights."""
        self.weights: dict[str, PackedWeight] = {}
        self.num_made = 0
        """Weights that the file did not have."""

    def get(self, name: str, make: Callable[[], Packed]) -> Packed:
        """Return a weight; `make` is called if there is none of this name."""
        if name not in self.weights:
            made = make()
            if not isinstance(made, tuple):
                return made  # in a layout that cannot be stored
            self.weights[name] = made
            self.num_made += 1
        return self.weights[name]

    @property
    def num_bytes(self) -> int:
        return sum(rows.memory.nbytes for weight in self.weights.values() for rows in weight)


class PackedFile:
    """The file of one rank of a model.

    Args:
        name: of the model and of what it is loaded for.
        identity: everything that the weights in it depend on.
        max_bytes: of all files of the directory.
        min_bytes: packed weights of fewer bytes are not written.
    """

    def __init__(self, directory: Path, name: str, identity: str, max_bytes: int, min_bytes: int) -> None:
        self._directory, self._path, self._identity = directory, directory / (name + SUFFIX), identity
        self._max_bytes, self._min_bytes = max_bytes, min_bytes
        self._ends = Event()
        self._thread: Thread | None = None

    def read(self, progress: Progress) -> PackedWeights:
        """Return the weights of the file; none, if it is missing, of another identity, or damaged."""
        found = PackedWeights()
        try:
            check_private(self._directory)
            file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return found
        try:
            header = _read_header(file)
            if header.identity != self._identity:
                log.info("%s is of another version of the weights or kernels; it is made anew", self._path)
                return found
            found.weights = _map_arrays(file, header, progress)
            with suppress(OSError):
                os.utime(file)  # the least recently used files are removed first
        except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
            log.warning("%s is torn, damaged or foreign (%s); it is made anew", self._path, error)
            with suppress(OSError):
                self._path.unlink()
            return found
        finally:
            os.close(file)
        found.contents, found.types = header.contents, set(header.types)
        log.info("packed weights: %s from %s", size_text(found.num_bytes), self._path)
        return found

    def keep(self, weights: PackedWeights, contents: Contents, is_current: Callable[[], bool]) -> None:
        """Write the weights on a thread of its own, if some of them were made.

        Args:
            contents: digest of each part of the checkpoint.
            is_current: return whether the checkpoint is still the one that was read.
        """
        if not weights.num_made or weights.num_bytes < self._min_bytes:
            return

        def write() -> None:
            try:
                digests = {part: digest.result() for part, digest in contents.items()}
                if is_current():
                    self._make_room(weights.num_bytes)
                    self._write(weights, digests)
            except (OSError, CheckpointError) as error:
                log.warning("packed weights are not kept in %s: %s", self._directory, error)

        self._thread = Thread(target=write, name="packed-weights", daemon=True)
        self._thread.start()

    def end(self, patience: float = 0.0) -> None:
        """Wait for the writer, which gives up after `patience` seconds."""
        self.wait(patience)
        self._ends.set()
        self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the file is written, or `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _write(self, weights: PackedWeights, contents: Mapping[str, str]) -> None:
        temporary = self._directory / f"{TEMPORARY}{self._path.name}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(file, "wb") as stream:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_ino != temporary.stat().st_ino:
                    return  # another process has just renamed it
            except (BlockingIOError, FileNotFoundError):
                return  # another process writes the same weights, or has written them
            try:
                self._write_file(stream, weights, contents)
                temporary.rename(self._path)
                log.info("packed weights: %s kept in %s", size_text(weights.num_bytes), self._path)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise

    def _write_file(self, stream: BinaryIO, weights: PackedWeights, contents: Mapping[str, str]) -> None:
        stream.truncate()
        arrays = {name: [self._write_rows(stream, x) for x in rows] for name, rows in weights.weights.items()}
        header = _Header(self._identity, dict(contents), sorted(weights.types), stream.tell(), arrays)
        text = msgspec.json.encode(header)
        stream.write(text + _TRAILER.pack(len(text), zlib.crc32(text), _MAGIC))
        stream.flush()
        os.fsync(stream.fileno())  # a file with the last name is whole also after a loss of power

    def _write_rows(self, stream: BinaryIO, rows: PackedRows) -> _Array:
        begin, data, checksum = stream.tell(), _words(rows.memory), 0
        for first in range(0, len(data), _CHUNK_WORDS):
            if self._ends.is_set():
                raise InterruptedError(EINTR, "the worker leaves")
            chunk = data[first : first + _CHUNK_WORDS]
            checksum += checksum_of(chunk)
            stream.write(chunk.data)
        stream.write(bytes(-data.nbytes % _ALIGNMENT))
        dtype, shape = str(rows.memory.dtype).removeprefix("torch."), list(rows.memory.shape)
        return _Array(rows.layout, rows.outputs, rows.inputs, dtype, shape, begin, checksum % (1 << 64))

    def _make_room(self, size: int) -> None:
        """Remove the files that were not used for longest. Raises: OSError, if there is no room."""
        make_private(self._directory)
        if size > self._max_bytes:
            raise OSError(ENOSPC, f"{size_text(size)} are more than --weights-cache-bytes allows")
        if size > (free := disk_usage(self._directory).free) // 2:
            raise OSError(ENOSPC, f"{size_text(size)} are more than half of the free {size_text(free)}")
        files, old = [], time.time() - LEFT_BEHIND_SECONDS
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):
                status = path.stat(follow_symlinks=False)
                if path.name.startswith(TEMPORARY) and status.st_mtime < old:
                    path.unlink()
                elif path.suffix == SUFFIX and path != self._path:
                    files.append((status.st_mtime, status.st_size, path))
        size += sum(each for _, each, _ in files)
        for _, each, path in sorted(files):
            if size <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            size -= each


def _read_header(file: int) -> _Header:
    """Raises: ValueError or MsgspecError, if the file is not whole; OSError"""
    size = os.fstat(file).st_size
    length, checksum, magic = _TRAILER.unpack(os.pread(file, _TRAILER.size, max(0, size - _TRAILER.size)))
    if magic != _MAGIC or length > size:
        raise ValueError("it has no header")
    text = os.pread(file, length, size - _TRAILER.size - length)
    if zlib.crc32(text) != checksum:
        raise ValueError("its header is damaged")
    return msgspec.json.decode(text, type=_Header)


def _map_arrays(file: int, header: _Header, progress: Progress) -> dict[str, PackedWeight]:
    """Raises: ValueError, if the file is torn or an array is damaged; OSError"""
    # Copy on write: torch accepts the memory without a warning, and nothing reaches the file. Huge pages are not
    # requested: products were 10 to 15 % slower with them.
    region = mmap.mmap(file, header.size, access=mmap.ACCESS_COPY)
    memory, done = torch.frombuffer(region, dtype=torch.uint8), 0

    def check(array: _Array) -> PackedRows:
        nonlocal done
        dtype = getattr(torch, array.dtype)
        values = memory[array.begin : array.begin + dtype.itemsize * prod(array.shape)]
        if checksum_of(_words(values)) % (1 << 64) != array.checksum:
            raise ValueError("an array is damaged")
        done += len(values)
        progress("checking packed weights", done / header.size)
        return PackedRows(array.layout, array.outputs, array.inputs, values.view(dtype).view(array.shape))

    return {name: tuple(map(check, weight)) for name, weight in header.weights.items()}


def _words(memory: torch.Tensor) -> NDArray[np.uint64]:
    """Panels are a multiple of 64 outputs, so their bytes are whole words."""
    return memory.view(-1).view(torch.uint8).numpy().view(np.uint64)


def checksum_of(words: NDArray[np.uint64]) -> int:
    return int(np.add.reduce(words))
