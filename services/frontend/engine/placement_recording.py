"""Recordings of the placement core in a file, a line of JSON per event and decision, for `runahead replay FILE`."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from services.frontend.placement.records import PlacementStarted, Record
from services.frontend.placement.replay import decode_record

log = logging.getLogger("runahead.frontend")

MAX_BYTES = 1 << 30
"""Size at which a recording ends: a replay needs its beginning."""
WRITE_SECONDS = 1.0
"""Seconds of events that a frontend that is killed may lose."""


class PlacementRecording:
    """Appends to a file that only its user can read. A full disk ends the recording, and nothing else."""

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        """Raises: OSError, if the file cannot be written, or another frontend writes it"""
        self._path = Path(os.path.expanduser(path))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._file = os.fdopen(descriptor, "ab", buffering=0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise OSError(f"{path} is written by another frontend; each needs a file of its own") from None
        self._left = max_bytes - os.fstat(descriptor).st_size
        self._lines = [b"\n"]  # the last line of a frontend that was killed may be torn
        self._written = 0.0
        """When the last lines were written: monotonic seconds."""

    def __call__(self, record: Record) -> None:
        if self._file.closed:
            return
        self._lines.append(msgspec.json.encode(record) + b"\n")
        if (now := time.monotonic()) - self._written >= WRITE_SECONDS:
            self._written = now
            self._write()

    def _write(self) -> None:
        content, self._lines = b"".join(self._lines), []
        self._left -= len(content)
        try:
            if self._left >= 0 and self._file.write(content) == len(content):
                return
            why = f"it may have {MAX_BYTES >> 30} GiB" if self._left < 0 else "the disk is full"
        except OSError as error:
            why = str(error.strerror)
        log.error("the recording of placement in %s ends: %s", self._path, why)
        self._file.close()

    def close(self) -> None:
        if not self._file.closed:
            self._write()
            self._file.close()


def read_recordings(path: Path) -> Iterator[list[Record]]:
    """Iterate over the recordings in a file, one for each start of a frontend.

    Raises: OSError; ValueError, if a line is no record, other than the last one of a frontend
    """
    found, torn = list[Record](), ""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = decode_record(line)
            except msgspec.MsgspecError as error:
                torn = torn or f"{path}, line {number}: {error}"
                continue
            if isinstance(record, PlacementStarted):
                torn = ""
                if found:
                    yield found
                found = []
            if torn:
                raise ValueError(torn)
            found.append(record)
    if found:
        yield found
