"""The HTTP response of a streamed answer."""

import contextlib
from collections.abc import Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.engine.streams import ResponseStream
from services.frontend.errors import GONE, APIError
from services.frontend.http.asgi_sink import ASGISink
from services.frontend.http.connection import Connection
from services.frontend.openai.answers.chunk import ChoiceWriter


class StreamEncoder(Protocol):
    """Writes the events of one HTTP response."""

    def next_choice(self) -> ChoiceWriter:
        """Return the writer of the next choice."""
        ...

    def opening(self) -> bytes:
        """Return the events that precede any text."""
        ...

    def closing(self) -> bytes:
        """Return the events that follow the last choice."""
        ...

    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream that failed."""
        ...


class EventStream(Response):
    """Writes a step's events at once. While the client reads slowly, outputs wait and are joined into one write."""

    media_type = "text/event-stream"

    def __init__(
        self, stream: ResponseStream, first: bytes, encoder: StreamEncoder, on_end: Callable[[APIError | None], None]
    ) -> None:
        """
        Args:
            first: events of the first flush, which decided that the status is 200.
            on_end: called once, with the error if the stream did not complete.
        """
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._stream = stream
        self._first = first
        self._encoder = encoder
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: APIError | None = APIError(GONE, "the response was cancelled")
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                connection: Connection | None = scope["state"].get("connection")
                opened = ASGISink.open(send) if connection is None else contextlib.nullcontext(connection)
                async with opened as sink:
                    last = self._encoder.opening() + self._first
                    if self._stream.num_open:
                        if last:
                            sink.write(last)
                        last = await self._stream.last(sink)
                last += self._encoder.closing()
                failure = None
            except APIError as error:
                failure, last = error, self._encoder.error(error)
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._on_end(failure)
