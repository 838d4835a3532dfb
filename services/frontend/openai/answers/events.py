"""Chunks to server-sent events, in the form that OpenAI's clients read."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from services.frontend.errors import APIError
from services.frontend.openai.answers.chunk import ChoiceWriter, Chunk
from services.frontend.openai.answers.dialects import Dialect
from services.frontend.openai.answers.usage import UsageCounter
from services.frontend.openai.schemas.requests import StreamOptions
from services.frontend.openai.schemas.responses import AnswerHead, ChatDelta, CompletionChoice

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = {mark.encode(): f"\\u{ord(mark):04x}".encode() for mark in "\x85\u2028\u2029"}
"""Characters that JSON allows unescaped, but that some clients take for the end of a line."""


def one_line(encoded: bytes) -> bytes:
    """Escape characters in JSON that end a line for some clients."""
    for mark, escaped in _LINE_ENDS.items():
        encoded = encoded.replace(mark, escaped)
    return encoded


def _event(content: bytes) -> bytes:
    return b"data: " + one_line(content) + b"\n\n"


class ChoiceEvents(ChoiceWriter):
    __slots__ = ("_around_text", "_encoder", "_index")

    def __init__(self, encoder: "EventEncoder", index: int) -> None:
        self._encoder = encoder
        self._index = index
        self._around_text = encoder.around_text(index)

    def text(self, text: str) -> bytes:
        if self._around_text is None:
            return self.chunk(Chunk(text))
        before, after = self._around_text
        encoded = _encode(text)
        return before + (encoded if encoded.isascii() else one_line(encoded)) + after

    def chunk(self, chunk: Chunk) -> bytes:
        return self._encoder.chunk(self._index, chunk)


@dataclass
class EventEncoder:
    """`StreamEncoder` of OpenAI's and vLLM's form."""

    _dialect: Dialect
    _given: AnswerHead
    """Fields of every event, beside `object`."""
    _options: StreamOptions
    _usage: UsageCounter
    _first_fields: Mapping[str, Any]
    """Fields of the first event only."""

    def __post_init__(self) -> None:
        self._num_choices = 0
        self._head = {"object": self._dialect.chunk_object, **self._given}
        self._no_usage = {"usage": None} if self._options.include_usage else {}

    def next_choice(self) -> ChoiceEvents:
        self._num_choices += 1
        return ChoiceEvents(self, self._num_choices - 1)

    def _event(self, choice: CompletionChoice | ChatDelta, more: Mapping[str, Any] | None = None) -> bytes:
        """`more`: further fields of an event that precedes any text."""
        has_usage = self._options.continuous_usage_stats
        usage = {"usage": self._usage.to_json(is_before_output=more is not None)} if has_usage else self._no_usage
        return _event(_encode({**self._head, **(more or {}), "choices": [choice], **usage}))

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """Return the bytes before and after the text in an event that holds only text, which are encoded once.

        None, if such events differ in more than their text.
        """
        if not self._dialect.has_constant_frame or self._options.continuous_usage_stats:
            return None
        mark = uuid.uuid4().hex
        before, _, after = self.chunk(index, Chunk(mark)).partition(_encode(mark))
        return before, after

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        return b"".join(map(self._event, self._dialect.deltas(index, chunk)))

    def opening(self) -> bytes:
        openings = [self._dialect.opening(index) for index in range(self._num_choices)]
        choices = [opening for opening in openings if opening is not None]
        fields = [self._first_fields, *[{}] * len(choices)]
        return b"".join(map(self._event, choices, fields))

    def closing(self) -> bytes:
        if not self._options.include_usage:
            return DONE
        usage = self._dialect.counted(self._usage.to_json())
        return _event(_encode({**self._head, "choices": [], "usage": usage})) + DONE

    def error(self, error: APIError) -> bytes:
        return _event(error.encoded())
