"""Files of recordings: segments of checked frames in a directory that only its user can read.

A segment starts with `MAGIC`; a frame is its length and its CRC-32 (little-endian uint32), then msgpack arrays of
records, compressed with zlib. A process that dies leaves a torn frame at most at the end of its last segment.
"""

import errno
import logging
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from services.scheduler.core.observer import Record
from services.scheduler.recording.records import RECORD, VERSION, RecordingHeader

log = logging.getLogger("runahead.scheduler.recorder")

MAGIC = b"RUNAREC\1"
_NAME = re.compile(r"(\d{13,})-(\d{6,})\.recording")
"""Name of a segment: incarnation and number."""
MAX_FRAME = 1 << 30
"""Bytes; a longer frame is damaged."""
_FRAME = struct.Struct("<II")
_SEGMENTS = 16
"""Segments that `max_bytes` is divided into."""
_SEGMENT_BYTES = 64 << 20
"""Largest segment."""
_STARTS = 4
"""Another start is due after this part of `max_bytes`."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[list[Record]] = msgspec.msgpack.Decoder(list[RECORD])


class RecordingError(Exception):
    """A recording cannot be read. The text is one line for the user."""


def segment_file(directory: Path, incarnation: int, segment: int) -> Path:
    return directory / f"{incarnation:013d}-{segment:06d}.recording"


def segments_of(directory: Path) -> list[tuple[int, int, Path]]:
    """Return incarnation, number and file of each segment in a directory, oldest first. Other files are left out.

    Raises: OSError
    """
    named = ((_NAME.fullmatch(file.name), file) for file in directory.iterdir())
    return sorted((int(name[1]), int(name[2]), file) for name, file in named if name)


class SegmentWriter:
    """Appends frames, begins another segment when one is full, and deletes the oldest when the bound is reached.

    A replay begins with a *start*: a segment before which the core had no state. The first segment is one. There are
    others if the service restarts the core when `is_start_due`.
    """

    def __init__(self, directory: Path, header: Callable[[int], RecordingHeader], max_bytes: int) -> None:
        """
        Args:
            header: returns the header of a segment.
            max_bytes: bound of all recordings in the directory.
        """
        self._directory, self._header, self._max_bytes = directory, header, max_bytes
        self._segment_bytes = min(max_bytes // _SEGMENTS, _SEGMENT_BYTES)
        self._segment = 0
        self._since_start = 0
        """Bytes."""
        self._last_start: Path | None = None
        """None: it was deleted."""
        self._begin(is_start=True)

    @property
    def is_start_due(self) -> bool:
        return self._since_start * _STARTS >= self._max_bytes

    def start(self) -> None:
        """Begin a segment that is a start. Raises: OSError"""
        self._begin_another(is_start=True, num_bytes=0)

    def _begin_another(self, is_start: bool, num_bytes: int) -> None:
        """`num_bytes`: size of the frame that is written next."""
        self.close()
        self._segment += 1
        self._begin(is_start)
        self._delete_oldest(max(self._segment_bytes, self._size + num_bytes))

    def _begin(self, is_start: bool) -> None:
        header = replace(self._header(self._segment), is_start=is_start)
        path = segment_file(self._directory, header.incarnation, self._segment)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._size = 0
        self._append(MAGIC + _frame_of([header]))
        if is_start:
            self._since_start, self._last_start = 0, path

    def write(self, records: Sequence[Record]) -> None:
        """Write a frame, unless it is empty. Raises: OSError"""
        if not records:
            return
        frame = _frame_of(records)
        if self._size + len(frame) > self._segment_bytes:
            self._begin_another(is_start=False, num_bytes=len(frame))
        self._append(frame)
        self._since_start += len(frame)

    def _append(self, content: bytes) -> None:
        """Raises: OSError, also if the disk has room for a part only: what followed this part could not be read."""
        written = self._file.write(content)
        self._size += written
        if written < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _delete_oldest(self, room: int) -> None:
        """Delete segments until the newest one may take `room` bytes."""
        *older, _ = (file for *_, file in segments_of(self._directory))
        excess = sum(file.stat().st_size for file in older) + room - self._max_bytes
        for file in older:
            if excess <= 0:
                return
            excess -= file.stat().st_size
            file.unlink()
            if file == self._last_start:
                self._last_start = None
                log.warning(
                    "the recording has no start any more that it can be replayed from, until a moment comes in which "
                    "no request is open; a larger --record-max-bytes keeps more"
                )

    def close(self) -> None:
        self._file.close()


def _frame_of(records: Sequence[Record]) -> bytes:
    payload = zlib.compress(_encoder.encode(records), 1)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


class EventRecording:
    def __init__(self, directory: Path, incarnation: int | None = None) -> None:
        """`incarnation`: None: the latest one. Raises: RecordingError, if there is none, or it has another version."""
        try:
            found = segments_of(directory)
        except OSError as error:
            raise RecordingError(f"{directory} is no directory of a recording: {error.strerror}") from None
        if not found:
            raise RecordingError(
                f"{directory} contains no recording, no file INCARNATION-NUMBER.recording; "
                f"runahead serve --record {directory} writes one"
            )
        self.incarnations = sorted({incarnation for incarnation, *_ in found})
        self.incarnation = self.incarnations[-1] if incarnation is None else incarnation
        if self.incarnation not in self.incarnations:
            names = ", ".join(map(str, self.incarnations))
            raise RecordingError(f"{directory} contains no recording {incarnation}; it contains {names}")
        self._files = [file for incarnation, _, file in found if incarnation == self.incarnation]
        self.torn = ""
        """Description of a torn end of the last segment, once it was read; "": there is none."""
        first = next(self._read(self._files[0]), None)
        if not isinstance(first, RecordingHeader):
            raise RecordingError(f"{self._files[0]} ends before its first record: nothing was recorded in it")
        self.header = first

    def records(self) -> Iterator[Record]:
        """Iterate over the records without headers.

        Raises: RecordingError, if a segment is missing, or damaged before its end.
        """
        return self._read_from(self.header.segment)

    def records_from_start(self) -> Iterator[Record]:
        """Iterate over the records from the first start on. Raises: RecordingError, as `records` and `first_start`"""
        return self._read_from(self.first_start)

    @cached_property
    def first_start(self) -> int:
        """Number of the first segment that a replay can begin with.

        Raises: RecordingError, if there is none
        """
        for file in self._files:
            header = next(self._read(file), None)
            if isinstance(header, RecordingHeader) and (header.is_start or header.segment == 0):
                return header.segment
        raise RecordingError(
            f"the recording begins with segment {self.header.segment}, because older ones were deleted "
            "(--record-max-bytes), and since then some request has always been open; a replay needs a moment without"
        )

    def _read_from(self, first: int) -> Iterator[Record]:
        for number, file in enumerate(self._files[first - self.header.segment :], first):
            expected = segment_file(file.parent, self.incarnation, number)
            if file != expected:
                raise RecordingError(f"{expected} is missing")
            for record in self._read(file):
                if not isinstance(record, RecordingHeader):
                    yield record

    def _read(self, file: Path) -> Iterator[Record]:
        try:
            with file.open("rb") as stream:
                yield from self._read_frames(file, stream)
        except OSError as error:
            raise RecordingError(f"{file} cannot be read: {error.strerror}") from None

    def _read_frames(self, file: Path, stream: BinaryIO) -> Iterator[Record]:
        magic = stream.read(len(MAGIC))
        if not MAGIC.startswith(magic):
            raise RecordingError(f"{file} is no recording, or one of another version of the format")
        if magic != MAGIC:
            self._end_at(file, "ends before its first record", "it is ignored")
            return
        while True:
            at = stream.tell()
            if not (head := stream.read(_FRAME.size)):
                return
            if (records := _records_of(head, stream.read)) is None:
                break
            if isinstance(records[0], RecordingHeader) and records[0].version != VERSION:
                raise RecordingError(
                    f"{file} has version {records[0].version} of the format; this release reads {VERSION}"
                )
            yield from records
        left = file.stat().st_size - at
        self._end_at(file, f"is damaged {at:,} bytes from its start", f"what follows is ignored ({left:,} bytes)")

    def _end_at(self, file: Path, problem: str, consequence: str) -> None:
        """Note a torn end. Raises: RecordingError, if segments follow it."""
        if file != self._files[-1]:
            raise RecordingError(f"{file} {problem}")
        self.torn = f"{file} {problem}; {consequence}"


def _records_of(head: bytes, read: Callable[[int], bytes]) -> list[Record] | None:
    """Return the records of a frame; None if it is torn or damaged."""
    if len(head) < _FRAME.size:
        return None
    length, checksum = _FRAME.unpack(head)
    payload = read(length) if length <= MAX_FRAME else b""
    if len(payload) != length or zlib.crc32(payload) != checksum:
        return None
    try:
        return _decoder.decode(zlib.decompress(payload)) or None
    except (msgspec.MsgspecError, zlib.error):
        return None
