"""Segments of recordings: rotation within a bound, permissions, versions."""

import os
import resource
import stat
from pathlib import Path

import pytest

from services.private import make_output
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import TimeAdvanced
from services.scheduler.recording import EventRecording, RecordingError, RecordingHeader, SegmentWriter
from services.scheduler.recording.records import VERSION
from services.scheduler.recording.segments import segment_file

LIMITS = Limits(4, 64, 256, 32, 16)


def header(segment: int, version: int = VERSION, incarnation: int = 7) -> RecordingHeader:
    return RecordingHeader(version, incarnation, segment, False, "{}", LIMITS, 1, 100, 0, False, "test")


def times(first: int, count: int) -> list[TimeAdvanced]:
    """Numbers that do not compress well."""
    return [TimeAdvanced(1 / (first + index + 1.1)) for index in range(count)]


def test_records_come_back_in_order_over_several_segments(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, header, 16 << 10)
    for first in range(0, 400, 100):
        writer.write(times(first, 100))
    writer.close()
    assert len([*tmp_path.iterdir()]) > 1
    recording = EventRecording(tmp_path)
    assert recording.first_start == 0
    assert [*recording.records()] == [*recording.records_from_start()] == times(0, 400)


def test_the_oldest_segments_are_deleted_and_the_bound_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bound = 32 << 10
    writer = SegmentWriter(tmp_path, header, bound)
    for first in range(0, 20_000, 100):
        writer.write(times(first, 100))
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= bound
    writer.close()
    recording = EventRecording(tmp_path)
    assert "has no start any more" in caplog.text
    with pytest.raises(RecordingError, match="a replay needs a moment without"):
        recording.records_from_start()
    last = [*recording.records()]
    assert last == times(20_000 - len(last), len(last))


def test_a_recording_that_has_lost_its_beginning_replays_from_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, starts = SegmentWriter(tmp_path, header, 32 << 10), []
    for first in range(0, 20_000, 100):
        writer.write(times(first, 100))
        if writer.is_start_due:
            writer.start()
            starts.append(first + 100)
    writer.close()
    assert not caplog.records
    recording = EventRecording(tmp_path)
    kept = [*recording.records_from_start()]
    assert 20_000 - len(kept) in starts
    assert kept == times(20_000 - len(kept), len(kept))


def test_older_recordings_count_and_are_deleted_first(tmp_path: Path) -> None:
    for incarnation in (5, 6):

        def of(segment: int, incarnation: int = incarnation) -> RecordingHeader:
            return header(segment, incarnation=incarnation)

        writer = SegmentWriter(tmp_path, of, 32 << 10)
        for first in range(0, 4_000, 100):
            writer.write(times(first, 100))
        writer.close()
    recording = EventRecording(tmp_path)
    assert recording.incarnation == 6
    assert recording.incarnations == [6]
    with pytest.raises(RecordingError, match="no recording 5; it contains 6"):
        EventRecording(tmp_path, 5)


def test_files_are_for_their_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "new" / "recordings"
    make_output(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    SegmentWriter(directory, header, 1 << 20).close()
    assert stat.S_IMODE(segment_file(directory, 7, 0).stat().st_mode) == 0o600
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1)
        make_output(directory)  # root may write to a directory of another user, who cannot read the files
        patched.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
        with pytest.raises(PermissionError, match="cannot be written"):
            make_output(directory)
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        make_output(directory)


def test_another_version_is_refused_by_its_number(tmp_path: Path) -> None:
    SegmentWriter(tmp_path, lambda segment: header(segment, version=9), 1 << 20).close()
    with pytest.raises(RecordingError, match="version 9"):
        EventRecording(tmp_path)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, header, 16 << 10)
    for first in range(0, 1_000, 100):
        writer.write(times(first, 100))
    writer.close()
    segment_file(tmp_path, 7, 1).unlink()
    with pytest.raises(RecordingError, match=r"000001\.recording is missing"):
        [*EventRecording(tmp_path).records()]


def test_a_directory_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="contains no recording"):
        EventRecording(tmp_path)
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path / "missing", "No such file"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(RecordingError, match=f"{path} is no directory of a recording: {reason}"):
            EventRecording(path)


def test_files_with_other_names_are_neither_read_nor_deleted(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("7-000000.recording", "notes-1.recording", "a.recording")]
    for other in others:
        other.write_bytes(bytes(4096))
    writer = SegmentWriter(tmp_path, header, 32 << 10)
    for first in range(0, 4_000, 100):
        writer.write(times(first, 100))
    writer.close()
    assert EventRecording(tmp_path).incarnations == [7]
    assert all(other.exists() for other in others)


@pytest.mark.parametrize("size", [0, 4])
def test_a_segment_that_was_only_begun(tmp_path: Path, size: int) -> None:
    """A scheduler is killed between the creation of a file and its first record."""
    writer = SegmentWriter(tmp_path, header, 1 << 20)
    writer.write(times(0, 10))
    writer.close()
    first, second = segment_file(tmp_path, 7, 0), segment_file(tmp_path, 7, 1)
    second.write_bytes(first.read_bytes()[:size])
    recording = EventRecording(tmp_path)
    assert [*recording.records()] == times(0, 10)
    assert recording.torn == f"{second} ends before its first record; it is ignored"
    second.replace(first)
    with pytest.raises(RecordingError, match="ends before its first record"):
        EventRecording(tmp_path)


def fill(writer: SegmentWriter) -> tuple[int, str]:
    """Write until there is no room. Return the number of records that were written, and the reason of the end."""
    written = 0
    while True:
        try:
            writer.write(times(written, 100))
        except OSError as error:
            return written, str(error.strerror)
        written += 100


def test_a_frame_that_the_disk_has_no_room_for_ends_the_recording(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, header, 1 << 20)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        written, reason = fill(writer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.close()
    recording = EventRecording(tmp_path)
    assert reason == "No space left on device"
    assert [*recording.records()] == times(0, written)
    assert "is damaged" in recording.torn
