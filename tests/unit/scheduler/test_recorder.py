"""The flight recorder's thread: a recording ends at the first problem, and the scheduler goes on."""

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.codec import pack
from protocol.media import Media, MediaItem
from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams, StructuredOutputParams
from protocol.steps import ModelRunnerOutput, NewRequest, SchedulerOutput
from services.cli.app import run
from services.config import SchedulerConfig
from services.scheduler.build import CoreStart
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import (
    CoreRestarted,
    Record,
    RequestArrived,
    RequestFinished,
    RequestsAborted,
    ResultArrived,
    StepDispatched,
    TimeAdvanced,
)
from services.scheduler.grammar import INLINE_MASKS
from services.scheduler.policies import ChunkedPolicy
from services.scheduler.recording import (
    EventRecording,
    FlightRecorder,
    LiveRecording,
    RecordingError,
    RecordingHeader,
    SegmentWriter,
    recorder,
    stand_ins,
)
from services.scheduler.recording.conversion import TokenRemover
from services.scheduler.recording.records import VERSION, ArrivalRecord
from tests.waiting import wait_until

LIMITS = Limits(4, 64, 256, 32, 16)


def header(segment: int) -> RecordingHeader:
    return RecordingHeader(VERSION, 7, segment, True, "{}", LIMITS, 1, 100, 0, False, "test")


def events_of(token: int, text: str) -> tuple[RequestArrived, StepDispatched, ResultArrived]:
    """A request, its first step and a result, with this content wherever they have some."""
    one = pack([token])
    params = SamplingParams(8, logit_bias=((token, 1.0),), bad_words=((token,),), allowed_token_ids=one)
    media = Media([MediaItem(0, 4, text)], text.encode())
    structured = StructuredOutputParams("json", text)
    request = GenerateRequest(1, one * 16, 16, params, cache_salt=text, structured=structured, media=media)
    plan = SchedulerOutput(1, 1, *[pack([0])] * 3, pack([16]), b"\1", [NewRequest(0, 0, one * 16, 16, b"", params)])
    result = ModelRunnerOutput(1, 1, pack([0]), pack([0]), pack([1]), one, embeddings=one, draft_token_ids=one)
    step = StepDispatched(None, plan, ((0, 1),), *[np.zeros(1, np.int32)] * 3, 1, 1, 0, 0.0)
    return RequestArrived(0, request), step, ResultArrived(result)


def test_records_without_tokens_do_not_depend_on_what_requests_contain() -> None:
    found = []
    for token, text in ((7, "a"), (8, "b"), (8, "b")):
        (arrival,), *others = map(TokenRemover(LIMITS, 100).records, events_of(token, text))
        assert isinstance(arrival, ArrivalRecord)
        found.append((arrival.blocks, replace(arrival, blocks=b""), *others))
    (ids, *records), (others, *same), (again, *_) = found
    assert records == same
    assert len({ids, others, again}) == 3  # ids of blocks have a key of the recording


def test_a_request_that_every_token_ends_does_not_replay_without_tokens() -> None:
    assert stand_ins.filler(SamplingParams(1, eos_token_ids=(0,), stop_token_ids=(2,)), 3) == 1
    with pytest.raises(RecordingError, match="replays only with --record-tokens"):
        stand_ins.filler(SamplingParams(1, eos_token_ids=(0, 1), stop_token_ids=(2,)), 3)


class FullDisk(SegmentWriter):
    def write(self, records: Sequence[Record]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_recording(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording = FlightRecorder(header(0), FullDisk(tmp_path, header, 1 << 20))
    recording.observe(TimeAdvanced(1.0))
    recording.close()
    assert "the recording has ended: No space left on device" in caplog.text
    assert [*EventRecording(tmp_path).records()] == []


def test_a_disk_that_is_full_at_the_start_ends_no_scheduler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "record"
    recording, core = LiveRecording(SchedulerConfig(), 7, str(directory)), EngineCore(LIMITS, ChunkedPolicy(), 2, 50)
    directory.rmdir()
    recording.attach(core, CoreStart(LIMITS, 1, 50, 0, None, INLINE_MASKS, "test"))
    recording.on_turn(core)
    recording.close()
    assert "nothing is recorded: No such file or directory" in caplog.text


def test_a_start_waits_until_no_request_is_open_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FlightRecorder, "needs_start", lambda _: True)
    directory, core = str(tmp_path / "record"), EngineCore(LIMITS, ChunkedPolicy(), 2, 50)
    recording = LiveRecording(SchedulerConfig(record=directory, record_tokens=True), 7, directory)
    recording.attach(core, CoreStart(LIMITS, 1, 50, 0, None, INLINE_MASKS, "test"))
    core.add(0, GenerateRequest(1, pack([7] * 16), 16, SamplingParams(8)))
    recording.on_turn(core)
    core.abort(0, [1])
    recording.on_turn(core)
    core.add(0, GenerateRequest(2, pack([7] * 16), 16, SamplingParams(8)))
    assert len([*core.dispatch()]) == 2
    core.abort(0, [2])
    recording.close()
    happened = [type(record) for record in EventRecording(tmp_path / "record").records()]
    assert happened[:5] == [RequestArrived, RequestsAborted, RequestFinished, CoreRestarted, RequestArrived]
    first, _ = sorted((tmp_path / "record").iterdir())
    first.unlink()
    assert run(["replay", directory]) == 0
    out = capsys.readouterr().out
    assert "from segment 1: " in out
    assert "equal: 2 plans after " in out


def test_a_recording_with_a_gap_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "MAX_WAITING", 4)
    monkeypatch.setattr(recorder, "WRITE_SECONDS", 3600.0)
    recording = FlightRecorder(header(0), SegmentWriter(tmp_path, header, 1 << 20))
    for second in range(5):
        recording.observe(TimeAdvanced(float(second)))
    recording.close()
    assert "events come faster than they can be written" in caplog.text
    assert [*EventRecording(tmp_path).records()] == []


def test_each_start_is_needed_once_and_begins_a_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "WRITE_SECONDS", 0.01)
    recording = FlightRecorder(header(0), SegmentWriter(tmp_path, header, 1 << 14))
    restart = CoreRestarted(1, LIMITS, 17, 0, bytes(16))
    for _ in range(2):
        for number in range(2000):
            recording.observe(TimeAdvanced(1 / (number + 1.1)))
        wait_until(recording.needs_start, "a quarter of the bound is written")
        assert not recording.needs_start()
        recording.observe(restart)
    recording.observe(TimeAdvanced(2.0))
    recording.close()
    assert not recording.needs_start()
    *older, _ = sorted(tmp_path.iterdir())
    for file in older:
        file.unlink()
    assert [*EventRecording(tmp_path).records_from_start()] == [restart, TimeAdvanced(2.0)]
