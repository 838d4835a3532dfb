"""Responses that are generated apart from the connection that requested them, and their events, to be read again."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from services.frontend.engine.streams import ResponseStream
from services.frontend.errors import GONE, APIError
from services.frontend.responses_api.answers import END_OF_EVENT, ResponseEvents, ResponseInProgress
from services.frontend.responses_api.responses import ResponseObject

log = logging.getLogger("runahead.frontend")

MAX_EVENTS_PER_WRITE = 256
"""Events that a reader gets in one piece; a client that reads slowly is then waited for."""
EVENT_OVERHEAD = 64
"""Bytes that an event takes beside its text, at most."""


def events_in(data: bytes) -> list[bytes]:
    """Return each of the events, which are complete."""
    return [event + END_OF_EVENT for event in data.split(END_OF_EVENT)[:-1]]


class Run(Protocol):
    """A response that was created with `background`, as its readers see it."""

    @property
    def response(self) -> bytes:
        """The response as it is now, as JSON."""
        ...

    def behind(self, number: int) -> AsyncIterator[bytes]:
        """Yield the events behind a sequence number as they are written, until the last one."""
        ...

    async def cancel(self) -> None:
        """End the response, unless it has ended, and wait for its end."""
        ...


class EventLog(ABC):
    """Events of one response by their sequence numbers. The sink of a `ResponseStream`, which is never full."""

    is_full = False

    def __init__(self) -> None:
        self.on_writable: Callable[[], None] | None = None
        self.is_complete = False
        self._grown = asyncio.Event()

    def body_writer(self) -> Callable[[bytes], None]:
        return self.write

    def write(self, data: bytes, response: bytes = b"") -> None:
        """Add complete events. With the last ones comes the response, as JSON."""
        self.is_complete |= bool(response)
        self._add(data, response)
        self._grown.set()
        self._grown = asyncio.Event()

    @abstractmethod
    def _add(self, data: bytes, response: bytes) -> None: ...

    @abstractmethod
    def behind(self, number: int) -> AsyncIterator[bytes]: ...

    def on_chunk(self) -> None:  # noqa: B027  few need it
        """Some tokens became a chunk; its events are written next."""

    async def growth(self) -> None:
        """Wait until something is written."""
        await self._grown.wait()

    async def complete(self) -> None:
        """Wait for the last event."""
        while not self.is_complete:
            await self.growth()


class MemoryLog(EventLog):
    """Events in memory.

    Args:
        on_growth: called with the number of bytes that were added, which includes the response's.
    """

    def __init__(self, on_growth: Callable[[int], None]) -> None:
        super().__init__()
        self.size = 0
        """Bytes."""
        self._on_growth = on_growth
        self._events: list[bytes] = []

    def _add(self, data: bytes, response: bytes) -> None:
        added = events_in(data)
        num_bytes = len(data) + EVENT_OVERHEAD * len(added) + len(response)
        self._events += added
        self.size += num_bytes
        self._on_growth(num_bytes)

    async def behind(self, number: int) -> AsyncIterator[bytes]:
        begin = number + 1
        while True:
            if events := self._events[begin : begin + MAX_EVENTS_PER_WRITE]:
                begin += len(events)
                yield b"".join(events)
            elif self.is_complete:
                return
            else:
                await self.growth()


class BackgroundRun:
    """The generation of one response. It ends by itself, or by `fail`, but not with a connection."""

    def __init__(self, answer: ResponseInProgress, events: EventLog) -> None:
        self.events = events
        self._answer: ResponseInProgress | None = answer
        self._encoder: ResponseEvents | None = ResponseEvents(answer, self._on_end, events.on_chunk)
        self._stream: ResponseStream | None = None
        self._last = b""

    @property
    def encoder(self) -> ResponseEvents:
        """The writer of the answer. Valid until the run ends."""
        assert self._encoder is not None
        return self._encoder

    @property
    def response(self) -> bytes:
        return self._last if self._answer is None else msgspec.json.encode(self._answer.to_json())

    def behind(self, number: int) -> AsyncIterator[bytes]:
        return self.events.behind(number)

    def start(self, stream: ResponseStream) -> None:
        """Take the stream whose requests were submitted with `encoder`."""
        self._stream = stream

    async def finish(self) -> APIError | None:
        """Write all events behind the opening ones. Return the error that ended the response, if one did."""
        encoder, stream, failure = self.encoder, self._stream, None
        assert stream is not None
        try:
            last = await stream.last(self.events) + encoder.closing()
        except APIError as error:
            failure, last = error, encoder.error(error)
        except Exception:
            log.exception("a response in the background failed with a bug: request_id=%s", stream.request_id)
            failure = APIError(500, "an internal error occurred; the log has its details")
            last = encoder.error(failure)
        self.events.write(last, self._last)
        return failure

    async def cancel(self) -> None:
        self.fail(APIError(GONE, "the response was cancelled"))
        await self.events.complete()

    def fail(self, error: APIError) -> None:
        """End the response with `error` soon, unless it has ended."""
        if self._stream is not None:
            self._stream.fail(error)

    def _on_end(self, response: ResponseObject) -> None:
        """Keep the bytes alone, as the parser and the items take more memory."""
        self._last = msgspec.json.encode(response)
        self._answer = self._encoder = self._stream = None
