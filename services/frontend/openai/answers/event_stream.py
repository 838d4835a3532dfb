"""Server-sent events: a generation's pieces as they come, in the form that OpenAI's clients read."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.errors import GONE, APIError
from services.frontend.http.connection import Connection
from services.frontend.metrics import Metrics
from services.frontend.openai.answers.chunk import Piece
from services.frontend.openai.answers.dialects import Dialect
from services.frontend.openai.answers.generation import Choice, Generation
from services.frontend.openai.schemas.requests import StreamOptions

NOTHING: Mapping[str, Any] = {}
_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {mark.encode(): f"\\u{ord(mark):04x}".encode() for mark in "\x85\u2028\u2029"}
"""What JSON may contain as it is, but some clients take for the end of a line."""


def _one_line(encoded: bytes) -> bytes:
    for mark, escaped in _LINE_ENDS.items():
        encoded = encoded.replace(mark, escaped)
    return encoded


def _event(content: bytes) -> bytes:
    return b"data: " + _one_line(content) + b"\n\n"


Around = tuple[bytes, bytes]
"""What stands before and after the text in every event that holds only text."""


def _with_text(around: Around, text: str) -> bytes:
    before, after = around
    encoded = _encode(text)
    return before + (encoded if encoded.isascii() else _one_line(encoded)) + after


class EventStream(Response):
    """One write for all that has arrived. Whoever reads slowly makes it wait, and what arrives meanwhile is joined."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        first: list[tuple[Choice, Piece]],
        dialect: Dialect,
        head: dict[str, Any],
        options: StreamOptions,
        metrics: Metrics,
        beginning: dict[str, Any] | None = None,
    ) -> None:
        """`first` is what the generation's first step forward brought: it decided that the status is 200. `beginning`
        are fields of the first event alone."""
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._generation = generation
        self._first = first
        self._dialect = dialect
        self._head = head
        self._nothing = {"usage": None} if options.include_usage else {}
        self._options = options
        self._metrics = metrics
        self._beginning = beginning or {}
        all_alike = dialect.text_is_plain and not options.continuous_usage_stats
        self.plain = [self._around_text(c.index) for c in generation.choices if all_alike]
        """For each choice, if all its events of text alone differ only in the text."""

    def _chunk(self, choice: dict[str, Any], more: Mapping[str, Any] = NOTHING) -> bytes:
        usage = {"usage": self._generation.usage()} if self._options.continuous_usage_stats else self._nothing
        return _event(_encode({**self._head, **more, "choices": [choice], **usage}))

    def _around_text(self, index: int) -> Around:
        """Of a choice, encoded once."""
        mark = uuid.uuid4().hex
        event = self._chunk(*self._dialect.deltas(index, Piece(mark)))
        before, _, after = event.partition(_encode(mark))
        return before, after

    def _grown(self, choice: Choice, piece: Piece) -> bytes:
        if self.plain and piece.is_plain:
            return _with_text(self.plain[choice.index], piece.text)
        return b"".join(map(self._chunk, self._dialect.deltas(choice.index, piece)))

    def _last(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        usage = {**self._head, "choices": [], "usage": self._generation.usage()}
        return _event(_encode(usage)) + DONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        code = GONE  # if we are cancelled
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                last = await self._write_text(scope["state"]["connection"])
                code, last = 200, last + self._last()
            except APIError as error:
                code, last = error.status, _event(error.encoded())
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._generation.close()
            self._metrics.on_request(code)

    async def _write_text(self, connection: Connection) -> bytes:
        """All but what belongs into the last write, which it returns. Raises: APIError"""
        body = self._opening()
        body += self.written(self._first)
        if self._generation.done:
            return body
        write = connection.body_writer()
        if body:
            write(body)
        reader = _Reader(self, connection, self._generation, write)
        self._generation.read_by(reader.read, write)
        connection.on_writable = reader.on_writable
        try:
            return await reader.last
        finally:
            connection.on_writable = None
            self._generation.stop_reading()

    def _opening(self) -> bytes:
        """Events before any text."""
        openings = [self._dialect.opening(choice.index) for choice in self._generation.choices]
        told = [opening for opening in openings if opening is not None]
        return b"".join(self._chunk(o, {} if i else self._beginning) for i, o in enumerate(told))

    def written(self, grown: list[tuple[Choice, Piece]]) -> bytes:
        return b"".join(self._grown(choice, piece) for choice, piece in grown)


class _Reader:
    """Makes events of what has arrived, one write for all of it, until the last."""

    __slots__ = ("_connection", "_generation", "_plain", "_stream", "_write", "last")

    def __init__(
        self,
        stream: EventStream,
        connection: Connection,
        generation: Generation,
        write: Callable[[bytes], None],
    ) -> None:
        self._stream = stream
        self._plain = stream.plain
        self._connection = connection
        self._generation = generation
        self._write = write
        self.last: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """What belongs into the last write, or why it does not come to that."""

    def read(self) -> bytes:
        """Nothing while the connection is full."""
        if self._connection.is_full or self.last.done():
            return b""
        try:
            if self._plain and (token := self._generation.take_text()) is not None:
                index, text = token
                return _with_text(self._plain[index], text) if text else b""
            body = self._stream.written(self._generation.take())
        except Exception as error:
            self.last.set_exception(error)
            return b""
        if not self._generation.done:
            return body
        self.last.set_result(body)
        return b""

    def on_writable(self) -> None:
        if body := self.read():
            self._write(body)
