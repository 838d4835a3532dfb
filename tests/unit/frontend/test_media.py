"""The process that reads files: a crash or a hang ends one request, and the next one gets another process."""

import asyncio
from pathlib import Path

import pytest

from protocol.media import MediaFile, MediaModel, ProcessedMedia
from services.frontend import media
from services.frontend.errors import APIError
from services.frontend.media import MediaProcessing
from tests.waiting import wait_until

MODEL = MediaModel("float32")


@pytest.fixture
def processing(monkeypatch: pytest.MonkeyPatch) -> MediaProcessing:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr(media, "MODULE", "tests.unit.frontend.faulty_media")
    return MediaProcessing(Path("model"))


def process(processing: MediaProcessing, url: str) -> ProcessedMedia:
    return asyncio.run(processing.process(MODEL, [1, 2], [MediaFile("image", url)]))


def test_a_crash_ends_one_request(processing: MediaProcessing) -> None:
    assert process(processing, "good").media.items[0].digest == "good"
    with pytest.raises(APIError, match="too much memory") as raised:
        process(processing, "crash")
    assert raised.value.status == 400
    assert process(processing, "good").media.items[0].digest == "good"


def test_a_hang_ends_one_request(processing: MediaProcessing, monkeypatch: pytest.MonkeyPatch) -> None:
    process(processing, "good")
    with monkeypatch.context() as patch:
        patch.setattr(media, "JOB_SECONDS", 0.2)
        with pytest.raises(APIError, match="too much memory"):
            process(processing, "hang")
    assert process(processing, "good").media.items[0].digest == "good"


def test_a_process_that_ends_between_requests_is_replaced(processing: MediaProcessing) -> None:
    process(processing, "good")
    process(processing, "last")
    wait_until(lambda: not processing.is_alive)
    assert process(processing, "good").media.items[0].digest == "good"


def test_a_process_that_does_not_start_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MODULE", "services.no_such_module")
    with pytest.raises(APIError, match="the log") as raised:
        process(MediaProcessing(Path("model")), "good")
    assert raised.value.status == 500


async def test_a_job_in_progress_does_not_delay_the_exit(processing: MediaProcessing) -> None:
    job = asyncio.create_task(processing.process(MODEL, [1, 2], [MediaFile("image", "hang")]))
    await asyncio.to_thread(wait_until, lambda: processing.is_alive)
    processing.close()
    with pytest.raises(APIError):
        await job


async def test_more_requests_than_may_wait_are_refused(
    processing: MediaProcessing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MAX_WAITING_BYTES", 2 * len("good"))
    jobs = [processing.process(MODEL, [1, 2], [MediaFile("image", "good")]) for _ in range(3)]
    *served, refused = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(refused, APIError)
    assert refused.status == 429
    assert all(isinstance(outcome, ProcessedMedia) for outcome in served)
    assert (await processing.process(MODEL, [1, 2], [MediaFile("image", "good")])).media.items[0].digest == "good"
