"""Recordings of placement in a file: several starts of a frontend, torn ends, and ends of the room for them."""

from pathlib import Path

import pytest

from services.frontend.engine import placement_recording
from services.frontend.engine.placement_recording import PlacementRecording, read_recordings
from services.frontend.placement import Placement
from services.frontend.placement.records import INPUTS
from services.frontend.placement.replay import first_difference
from tests.unit.frontend.placement.world import prompt, report


def record(path: Path, requests: int, **settings: int) -> None:
    """Record the placement of some requests on two engines."""
    recording = PlacementRecording(str(path), **settings)
    core = Placement(seed=1, record=recording)
    for name in "ab":
        core.on_engine(name, report())
    for key in range(requests):
        core.advance(float(2 * key))
        core.place(key, prompt((key, 20)))
    recording.close()


def test_each_start_of_a_frontend_replays_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "placement"
    record(path, 3)
    with path.open("ab") as file:  # it was killed while it wrote
        file.write(b'{"type":"advanced","no')
    record(path, 5)
    recordings = list(read_recordings(path))
    assert [len(recording) for recording in recordings] == [3 + 3 * 3, 3 + 5 * 3]
    assert [first_difference(recording) for recording in recordings] == [None, None]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "placement"
    record(path, 3)
    lines = path.read_bytes().split(b"\n")
    lines[4] = lines[4][:-3]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match="line 5: "):
        list(read_recordings(path))


def test_a_recording_that_has_no_more_room_ends_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "placement"
    monkeypatch.setattr(placement_recording, "WRITE_SECONDS", 0.0)
    for _ in range(2):
        record(path, 50, max_bytes=6000)
    recording, _ = read_recordings(path)
    assert 5 < len(recording) < 150
    assert path.stat().st_size <= 6000
    assert first_difference(recording) is None


def test_two_frontends_do_not_share_a_file(tmp_path: Path) -> None:
    first = PlacementRecording(str(tmp_path / "placement"))
    with pytest.raises(OSError, match="another frontend"):
        PlacementRecording(str(tmp_path / "placement"))
    first.close()
    PlacementRecording(str(tmp_path / "placement")).close()


def test_events_have_the_fields_of_earlier_recordings() -> None:
    kinds = [(kind.__struct_config__.tag, *kind.__struct_fields__) for kind in INPUTS]
    assert "; ".join(" ".join(map(str, names)) for names in kinds) == (
        "advanced now; engine name report; engine_removed name; blocks_stored name block_names; "
        "blocks_removed name block_names; blocks_cleared name; refusals_forgotten name; ended key; "
        "request key num_tokens names identity_required refused for_good; moves_requested; prefilled key"
    )
