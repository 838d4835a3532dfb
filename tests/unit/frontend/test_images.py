"""The process that reads images: a crash or a hang ends one request, and the next one gets another process."""

import asyncio
from pathlib import Path

import pytest

from protocol.media import MediaModel, ProcessedImages
from services.frontend import images
from services.frontend.errors import APIError
from services.frontend.images import ImageProcessing

MODEL = MediaModel("float32")


@pytest.fixture
def processing(monkeypatch: pytest.MonkeyPatch) -> ImageProcessing:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.setattr(images, "MODULE", "tests.unit.frontend.faulty_images")
    return ImageProcessing(Path("model"))


def process(processing: ImageProcessing, image: str) -> ProcessedImages:
    return asyncio.run(processing.process(MODEL, [1, 2], [image]))


def test_a_crash_ends_one_request(processing: ImageProcessing) -> None:
    assert process(processing, "good").media.items[0].digest == "good"
    with pytest.raises(APIError, match="too much memory") as raised:
        process(processing, "crash")
    assert raised.value.status == 400
    assert process(processing, "good").media.items[0].digest == "good"


def test_a_hang_ends_one_request(processing: ImageProcessing, monkeypatch: pytest.MonkeyPatch) -> None:
    process(processing, "good")
    with monkeypatch.context() as patch:
        patch.setattr(images, "JOB_SECONDS", 0.2)
        with pytest.raises(APIError, match="too much memory"):
            process(processing, "hang")
    assert process(processing, "good").media.items[0].digest == "good"


def test_a_process_that_ends_between_requests_is_replaced(processing: ImageProcessing) -> None:
    process(processing, "good")
    process(processing, "last")
    while processing.is_alive:
        pass
    assert process(processing, "good").media.items[0].digest == "good"


def test_a_process_that_does_not_start_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MODULE", "services.no_such_module")
    with pytest.raises(APIError, match="the log") as raised:
        process(ImageProcessing(Path("model")), "good")
    assert raised.value.status == 500


async def test_more_requests_than_may_wait_are_refused(
    processing: ImageProcessing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_WAITING", 2)
    jobs = [processing.process(MODEL, [1, 2], ["good"]) for _ in range(3)]
    *served, refused = await asyncio.gather(*jobs, return_exceptions=True)
    assert isinstance(refused, APIError)
    assert refused.status == 429
    assert all(isinstance(outcome, ProcessedImages) for outcome in served)
    assert (await processing.process(MODEL, [1, 2], ["good"])).media.items[0].digest == "good"
