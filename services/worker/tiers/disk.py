"""A tier in a directory that engines of one machine may share: one file per block.

    DIR/IDENTITY/2 digits of the name/the name    header, data

IDENTITY is a digest of everything that a block's content depends on beside tokens: weights, dtype, kernels, layout,
rank. Blocks hold prompts: files are 0600, directories 0700 and of this user. A process may be killed at any byte: a
file is written under another name and renamed. A file with another header, length or checksum than expected is removed
and counts as missing. The files that were used last stay, whatever engine or model they belong to.
"""

import logging
import os
import re
import secrets
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from services.private import make_private
from services.units import size_text
from services.worker.runner import LoadError
from services.worker.tiers.changes import TierChanges

log = logging.getLogger("runahead.worker")

MAGIC = b"RUNAKV1\n"
"""Format and version of a file."""
_HEADER = struct.Struct("<8s32s32sQI")
"""Magic, identity, name, bytes of data, CRC-32 of all before it and of the data."""
TEMPORARY = ".writing-"
LEFT_BEHIND_SECONDS = 600.0
"""Age at which a file that is being written has lost its writer."""
RETRY_SECONDS = 60.0
"""Seconds without writing after a write has failed."""
KEPT, BETWEEN_SCANS = 7 / 8, 1 / 32
"""Shares of the limit: what stays when files are removed, and what a process writes before it looks again."""
_DIRECTORY, _PART, _FILE = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{2}"), re.compile("[0-9a-f]{62}")


class DiskTier:
    label = "disk"

    def __init__(self, directory: str, identity: str, max_bytes: int) -> None:
        """Raises: LoadError, if the directory cannot be used."""
        self._root, self._max_bytes = Path(os.path.expanduser(directory)), max_bytes
        try:
            make_private(self._root)
        except OSError as error:
            raise LoadError(f"--kv-offload-dir {self._root}: {error.strerror}") from None
        self._identity = sha256(identity.encode()).digest()
        self._own = self._root / self._identity.hex()
        self._temporary = TEMPORARY + secrets.token_hex(8)
        """Name of a file that is being written. Processes of two containers may have the same number."""
        self._writes_from = 0.0
        """Monotonic seconds."""
        self._size, self._since_scan = 0, max_bytes
        """Bytes of all files when they were last looked at, less what was dropped since, and bytes written since."""
        self._is_scanned = False
        self.changes = TierChanges()
        if not os.access(self._root, os.W_OK):
            log.warning("--kv-offload-dir %s: it cannot be written; KV blocks are only read", self._root)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files; 0: they were not looked at."""
        return max(0, self._size + self._since_scan) if self._is_scanned else 0

    def begin(self) -> None:
        """Look at all files, if that was not done."""
        with suppress(OSError):
            self._make_room(0)

    def has(self, name: bytes) -> bool:
        return os.path.exists(self._path(name))  # False after any error: the write that follows meets and reports it

    def get(self, name: bytes, into: memoryview) -> bool:
        """Read a block. Return False if it is missing or wrong; then `into` is undefined."""
        path = self._path(name)
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            header, behind = bytearray(_HEADER.size), bytearray(1)
            size = os.readv(file, [header, into, behind])
            if size == _HEADER.size + len(into) and bytes(header) == self._header(name, into):
                with suppress(OSError):
                    os.utime(file)  # the least recently used files are removed first
                return True
        except OSError as error:
            log.warning("a KV block cannot be read: %s", error)
            return False
        finally:
            os.close(file)
        log.warning("%s is torn or foreign; it is removed, and its tokens are computed", path)
        with suppress(OSError):
            path.unlink()
            self.changes.removed.append(name)
        return False

    def put(self, name: bytes, data: memoryview) -> None:
        """Write a block, unless the last write has just failed."""
        if time.monotonic() < self._writes_from:
            return
        path, size = self._path(name), _HEADER.size + len(data)
        temporary = path.with_name(self._temporary)
        try:
            self._make_room(size)
            self._own.mkdir(0o700, exist_ok=True)
            path.parent.mkdir(0o700, exist_ok=True)
            try:
                file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with open(file, "wb") as stream:
                    stream.write(self._header(name, data))
                    stream.write(data)
                temporary.rename(path)
            except OSError:
                with suppress(OSError):
                    temporary.unlink()
                raise
            self._since_scan += size
            self.changes.stored.append(name)
        except OSError as error:
            self._writes_from = time.monotonic() + RETRY_SECONDS
            log.warning("no KV block is written to %s for %.0f s: %s", self._root, RETRY_SECONDS, error.strerror)

    def drop(self, name: bytes) -> None:
        """Remove a block. Raises: OSError, if that fails."""
        path = self._path(name)
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            self._size -= size  # may be less than 0: the block was written since
            self.changes.removed.append(name)

    def _path(self, name: bytes) -> Path:
        digits = name.hex()
        return self._own / digits[:2] / digits[2:]

    def _header(self, name: bytes, data: memoryview) -> bytes:
        known = _HEADER.pack(MAGIC, self._identity, name, len(data), 0)[:-4]
        return known + zlib.crc32(data, zlib.crc32(known)).to_bytes(4, "little")

    # -- the limit -----------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> None:
        """Look at all files, if other processes may have written much since, and remove the oldest ones."""
        is_full = self._size + self._since_scan + size > self._max_bytes
        if not is_full and self._since_scan < BETWEEN_SCANS * self._max_bytes:
            return
        files = sorted(self._files())
        self._size, self._since_scan, self._is_scanned = sum(bytes_of for _, bytes_of, _ in files), 0, True
        if self._size + size <= self._max_bytes:
            return
        before, goal = self._size, int(KEPT * self._max_bytes) - size
        for _, bytes_of, path in files:
            if self._size <= goal:
                break
            with suppress(FileNotFoundError):  # another process removed it
                os.unlink(path)
                self._note_removed(path)
            self._size -= bytes_of
        log.debug("KV blocks of %s are removed from %s", size_text(before - self._size), self._root)

    def _note_removed(self, path: str) -> None:
        *_, identity, part, rest = Path(path).parts
        if identity == self._own.name and _FILE.fullmatch(rest):
            self.changes.removed.append(bytes.fromhex(part + rest))

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Iterate over the files of all engines and models: time of the last use, bytes, path. Files of others stay."""
        for directory in _entries(self._root, _DIRECTORY):
            for part in _entries(directory, _PART):
                with suppress(FileNotFoundError), os.scandir(part) as entries:
                    for entry in entries:
                        is_temporary = entry.name.startswith(TEMPORARY)
                        if not (is_temporary or _FILE.fullmatch(entry.name)):
                            continue
                        with suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            if is_temporary and status.st_mtime < time.time() - LEFT_BEHIND_SECONDS:
                                os.unlink(entry.path)
                            else:
                                yield status.st_mtime, status.st_size, entry.path


def _entries(directory: Path | str, pattern: re.Pattern[str]) -> list[str]:
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        return [entry.path for entry in entries if pattern.fullmatch(entry.name) and entry.is_dir()]
    return []
