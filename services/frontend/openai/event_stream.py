"""Server-sent events: a generation's pieces as they come, in the form that OpenAI's clients read."""

import uuid
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.errors import GONE, APIError
from services.frontend.metrics import Metrics
from services.frontend.openai.dialects import Dialect
from services.frontend.openai.generation import Choice, Generation
from services.frontend.openai.piece import Piece

DONE = b"data: [DONE]\n\n"


def _event(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


class EventStream(Response):
    """One write for all that has arrived. Whoever reads slowly makes it wait, and what arrives meanwhile is joined."""

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        first: list[tuple[Choice, Piece]],
        dialect: Dialect,
        head: dict[str, Any],
        include_usage: bool,
        metrics: Metrics,
    ) -> None:
        """`first` is what the generation's first step forward brought: it decided that the status is 200."""
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._generation = generation
        self._first = first
        self._dialect = dialect
        self._head = head
        self._nothing = {"usage": None} if include_usage else {}
        self._include_usage = include_usage
        self._metrics = metrics
        self._plain = [self._around_text(c.index) for c in generation.choices if dialect.text_is_plain]

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return _event(msgspec.json.encode({**self._head, "choices": [choice], **self._nothing}))

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in every event that holds only text: encoded once."""
        mark = uuid.uuid4().hex
        event = self._chunk(*self._dialect.deltas(index, Piece(mark)))
        before, _, after = event.partition(msgspec.json.encode(mark))
        return before, after

    def _grown(self, choice: Choice, piece: Piece) -> bytes:
        if self._plain and piece.is_plain:
            before, after = self._plain[choice.index]
            return before + msgspec.json.encode(piece.text) + after
        return b"".join(map(self._chunk, self._dialect.deltas(choice.index, piece)))

    def _last(self) -> bytes:
        if not self._include_usage:
            return DONE
        usage = {**self._head, "choices": [], "usage": self._generation.usage()}
        return _event(msgspec.json.encode(usage)) + DONE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        code = GONE  # if we are cancelled
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await self._send_text(send)
                code, last = 200, self._last()
            except APIError as error:
                code, last = error.status, _event(error.encoded())
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._generation.close()
            self._metrics.on_request(code)

    async def _send_text(self, send: Send) -> None:
        """Raises: APIError"""
        openings = [self._dialect.opening(choice.index) for choice in self._generation.choices]
        body = b"".join(self._chunk(opening) for opening in openings if opening is not None)
        grown = self._first
        while True:
            body += b"".join(self._grown(choice, piece) for choice, piece in grown)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            if self._generation.done:
                return
            body, grown = b"", await self._generation.advance()
