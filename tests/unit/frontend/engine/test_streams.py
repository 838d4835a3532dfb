"""Outputs on their way to the bytes of responses: grouped by request, read in one pass and written in another."""

import asyncio
from collections.abc import Callable

import pytest

from protocol.requests import Finish, FinishReason
from services.frontend.engine import streams
from services.frontend.engine.streams import FlushQueue, RawLogprobs, RequestStream, ResponseStream
from services.frontend.errors import GONE, APIError

LENGTH = Finish(1, FinishReason.LENGTH)


class RecordingStream(RequestStream):
    """Records what it is fed, and returns `data` each time."""

    def __init__(self, response: ResponseStream, data: bytes = b"") -> None:
        super().__init__(response)
        self.data = data
        self.fed: list[tuple[list[int], Finish | None]] = []

    def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
        self.fed.append((tokens, end))
        self.has_ended = end is not None
        return self.data

    def add_logprobs(self, logprobs: RawLogprobs) -> None:
        raise AssertionError("none are sent")

    def add_embedding(self, values: bytes) -> None:
        raise AssertionError("none are sent")

    def arrive(self, *tokens: int, end: Finish | APIError | None = None) -> None:
        """As the engine client does it."""
        self.tokens.extend(tokens)
        self.end = end
        self.response.mark_due(self)

    @property
    def tokens_fed(self) -> list[list[int]]:
        return [tokens for tokens, _ in self.fed]


class FakeConnection:
    """A connection that records what is written to it."""

    def __init__(self, write: Callable[[bytes], None] | None = None) -> None:
        self.is_full = False
        self.on_writable: Callable[[], None] | None = None
        self.written: list[bytes] = []
        self.write = write or self.written.append


async def turns(count: int = 1) -> None:
    """Let the event loop run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_response_is_fed_once_per_flush_with_all_that_arrived() -> None:
    response = ResponseStream(FlushQueue())
    first, second = RecordingStream(response), RecordingStream(response)
    first.arrive(7)
    reading = asyncio.create_task(response.last())
    await turns()
    second.arrive(8)
    first.arrive(9)
    assert first.fed == [], "not when outputs arrive: others of the same message follow"
    await turns()
    assert (first.fed, second.fed) == ([([7, 9], None)], [([8], None)])
    await turns(3)
    assert len(first.fed) == 1, "nothing new, nothing fed"
    first.arrive(9, end=LENGTH)
    await turns()
    assert first.fed[1:] == [([9], LENGTH)], "the end comes with the last tokens"
    assert len(second.fed) == 1
    second.arrive(end=LENGTH)
    assert await reading == b""


async def test_all_responses_are_read_before_the_first_is_written() -> None:
    queue, order, tasks = FlushQueue(), list[str](), []

    def join(name: str, data: bytes) -> RecordingStream:
        class Ordered(RecordingStream):
            def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
                order.append(f"read {name}")
                return super().feed(tokens, end, now)

        response = ResponseStream(queue)
        connection = FakeConnection(lambda data: order.append(f"write {name} {data.decode()}"))
        tasks.append(asyncio.create_task(response.last(connection)))
        return Ordered(response, data)

    recorders = [join("a", b"1"), join("b", b""), join("c", b"3")]
    await turns()
    for recorder in recorders:
        recorder.arrive(7)
    await turns()
    assert order == ["read a", "read b", "read c", "write a 1", "write c 3"]
    for task in tasks:
        task.cancel()


async def test_write_that_fails_leaves_those_of_others_alone(caplog: pytest.LogCaptureFixture) -> None:
    def fail(data: bytes) -> None:
        raise OSError("no socket")

    queue, good = FlushQueue(), FakeConnection()
    tasks = []
    for connection in (FakeConnection(fail), good):
        response = ResponseStream(queue, "id-7")
        tasks.append(asyncio.create_task(response.last(connection)))
        RecordingStream(response, b"x").arrive(7)
    await turns(3)
    assert good.written == [b"x"]
    assert "a response was not written: request_id=id-7" in caplog.text
    for task in tasks:
        task.cancel()


async def test_outputs_for_a_full_connection_wait_and_are_joined() -> None:
    response, connection = ResponseStream(FlushQueue()), FakeConnection()
    stream = RecordingStream(response, b"x")
    reading = asyncio.create_task(response.last(connection))
    connection.is_full = True
    for token in (7, 8, 9):
        stream.arrive(token)
        await turns(3)
    assert stream.fed == []
    connection.is_full = False
    assert connection.on_writable is not None
    connection.on_writable()
    await turns()
    assert stream.tokens_fed == [[7, 8, 9]]
    assert connection.written == [b"x"]
    stream.arrive(end=LENGTH)
    assert await reading == b"x", "the last bytes are written together with the end of the response"
    assert connection.on_writable is None


async def test_reading_pauses_between_the_first_outputs_and_the_connection() -> None:
    response, connection = ResponseStream(FlushQueue()), FakeConnection()
    stream = RecordingStream(response, b"x")
    stream.arrive(7)
    assert await response.first() == b"x"
    stream.arrive(8)
    await turns(3)
    stream.arrive(9)
    await turns(3)
    assert stream.tokens_fed == [[7]]
    reading = asyncio.create_task(response.last(connection))
    await turns(3)
    assert stream.tokens_fed[1:] == [[8, 9]]
    assert connection.written == [b"x"]
    reading.cancel()


async def test_more_tokens_than_a_flush_reads_are_fed_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_TOKENS_PER_FLUSH", 2)
    response = ResponseStream(FlushQueue())
    first, second = RecordingStream(response), RecordingStream(response)
    reading = asyncio.create_task(response.last())
    first.arrive(*range(5), end=LENGTH)
    second.arrive(8, end=LENGTH)
    await reading
    assert [len(tokens) for tokens in first.tokens_fed] == [2, 2, 1]
    assert [token for tokens in first.tokens_fed for token in tokens] == [*range(5)]
    assert [end for _, end in first.fed] == [None, None, LENGTH]
    assert second.fed == [([8], LENGTH)]


async def test_failed_request_ends_the_response_behind_the_tokens_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_TOKENS_PER_FLUSH", 2)
    response, connection = ResponseStream(FlushQueue()), FakeConnection()
    stream = RecordingStream(response, b"x")
    reading = asyncio.create_task(response.last(connection))
    stream.arrive(7, 8, 9, end=APIError(503, "it is gone"))
    with pytest.raises(APIError, match="it is gone"):
        await reading
    assert stream.tokens_fed == [[7, 8]]
    assert connection.written == [b"x"]


@pytest.mark.parametrize("is_full", [False, True])
async def test_disconnect_overtakes_what_waits_and_nothing_is_fed_after_it(is_full: bool) -> None:
    response, connection = ResponseStream(FlushQueue()), FakeConnection()
    stream, connection.is_full = RecordingStream(response), is_full
    reading = asyncio.create_task(response.last(connection))
    stream.arrive(7)
    await turns(3 if is_full else 0)
    response.fail(APIError(GONE, "it left"))
    with pytest.raises(APIError, match="it left"):
        await asyncio.wait_for(reading, 20)
    stream.arrive(8)
    await turns(3)
    assert stream.fed == []
    with pytest.raises(APIError, match="it left"):
        await response.last()


async def test_nothing_is_fed_after_the_end() -> None:
    response = ResponseStream(FlushQueue())
    first, second = RecordingStream(response), RecordingStream(response)
    reading = asyncio.create_task(response.last())
    first.arrive(7, end=LENGTH)
    await turns(3)
    first.arrive(8)
    second.arrive(end=LENGTH)
    await reading
    assert first.fed == [([7], LENGTH)]


async def test_request_that_cannot_be_fed_ends_the_response() -> None:
    class Failing(RecordingStream):
        def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
            raise APIError(500, "a token was lost")

    response = ResponseStream(FlushQueue())
    Failing(response).arrive(12)
    with pytest.raises(APIError, match="a token was lost"):
        await response.first()


async def test_a_bug_ends_its_response_with_an_error_that_hides_it(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(RecordingStream):
        def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
            raise KeyError("secret")

    response = ResponseStream(FlushQueue(), "r-1")
    Buggy(response).arrive(7)
    with pytest.raises(APIError, match="an internal error") as failed:
        await response.last()
    assert failed.value.status == 500
    assert "request_id=r-1" in caplog.text
    assert "KeyError" in caplog.text
