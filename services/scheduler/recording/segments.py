"""Files of recordings: segments of checked frames in a directory that only its user can read.

A segment starts with `MAGIC`; a frame is its length and its CRC-32 (little-endian uint32), then msgpack arrays of
records, compressed with zlib. A process that dies leaves a torn frame at most at the end of its last segment.
"""

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
from msgspec.structs import replace

from services.scheduler.recording.records import VERSION, Record, RecordingHeader

log = logging.getLogger("runahead.scheduler.recorder")

MAGIC = b"RUNAREC\1"
SUFFIX = ".recording"
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
_decoder: msgspec.msgpack.Decoder[list[Record]] = msgspec.msgpack.Decoder(list[Record])


class RecordingError(Exception):
    """A recording cannot be read. The text is one line for the user."""


def prepare_directory(path: str) -> Path:
    """Make the directory of recordings with mode 0700.

    Raises: OSError, if it cannot be made or others can read it.
    """
    directory = Path(path).expanduser()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--record {path}: the directory cannot be made: {error.strerror}") from None
    if directory.stat().st_mode & 0o077:
        raise PermissionError(f"--record {path}: others can read the directory; chmod 700 {path}")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(f"--record {path}: the directory cannot be written")
    return directory


def segment_file(directory: Path, incarnation: int, segment: int) -> Path:
    return directory / f"{incarnation:013d}-{segment:06d}{SUFFIX}"


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
        self._size = self._file.write(MAGIC)
        self._size += self._file.write(_frame_of([header]))
        if is_start:
            self._since_start, self._last_start = 0, path

    def write(self, records: Sequence[Record]) -> None:
        """Write a frame. Raises: OSError"""
        frame = _frame_of(records)
        if self._size + len(frame) > self._segment_bytes:
            self._begin_another(is_start=False, num_bytes=len(frame))
        self._size += self._file.write(frame)
        self._since_start += len(frame)

    def _delete_oldest(self, room: int) -> None:
        """Delete segments until the newest one may take `room` bytes."""
        *older, _ = sorted(self._directory.glob(f"*{SUFFIX}"))
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
    """A recording of one scheduler."""

    def __init__(self, directory: Path, incarnation: int | None = None) -> None:
        """
        Args:
            incarnation: None: the latest recording.

        Raises: RecordingError, if there is none, or it has another version.
        """
        found = {int(file.name.partition("-")[0]) for file in directory.glob(f"*-*{SUFFIX}")}
        if not found:
            raise RecordingError(f"{directory} contains no recording (runahead serve --record {directory})")
        self.incarnations = sorted(found)
        self.incarnation = self.incarnations[-1] if incarnation is None else incarnation
        if self.incarnation not in found:
            names = ", ".join(map(str, self.incarnations))
            raise RecordingError(f"{directory} contains no recording {incarnation}; it contains {names}")
        self._files = sorted(directory.glob(f"{self.incarnation:013d}-*{SUFFIX}"))
        self.torn = ""
        """Description of a torn end of the last segment, once it was read; "": there is none."""
        first = next(self._read(self._files[0]), None)
        if not isinstance(first, RecordingHeader):
            raise RecordingError(f"{self._files[0]} has no header: it is torn or no recording")
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
        with file.open("rb") as stream:
            if stream.read(len(MAGIC)) != MAGIC:
                raise RecordingError(f"{file} is no recording of this version of Runahead")
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
        text = f"{file} is damaged {at:,} bytes from its start"
        if file != self._files[-1]:
            raise RecordingError(text)
        self.torn = f"{text}; what follows is ignored ({file.stat().st_size - at:,} bytes)"


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
