"""Segments of recordings: rotation within a bound, permissions, versions."""

import stat
from pathlib import Path

import pytest

from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import TimeAdvanced
from services.scheduler.recording import EventRecording, RecordingError, RecordingHeader, SegmentWriter
from services.scheduler.recording.records import VERSION
from services.scheduler.recording.segments import prepare_directory, segment_file

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


def test_the_oldest_segments_are_deleted_and_the_bound_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_files_are_for_their_user_only(tmp_path: Path) -> None:
    directory = prepare_directory(str(tmp_path / "new" / "recordings"))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    SegmentWriter(directory, header, 1 << 20).close()
    assert stat.S_IMODE(segment_file(directory, 7, 0).stat().st_mode) == 0o600
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        prepare_directory(str(directory))


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


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="contains no recording"):
        EventRecording(tmp_path)
