"""Parts of an answer's text, and the base of the parsers that find them."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass

from services.frontend.parsing.text_buffer import Parsing, TextBuffer


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without the tags around it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call; its arguments follow."""

    index: int
    """Index of the call within its answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Next part of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str


ParsedEvent = Content | Reasoning | CallStart | Arguments


class TextParser(ABC):
    """Parser of one answer: text in, events out. No I/O, no clock."""

    def __init__(self) -> None:
        self._buffer = TextBuffer()
        self._events: list[ParsedEvent] = []
        self._parsing: Generator[None, None, None] = self._read()
        next(self._parsing)

    @abstractmethod
    def _read(self) -> Parsing[None]:
        """Read the buffer up to the end of the text, and append to `_events` what is certain."""

    def push(self, text: str, is_last: bool = False) -> list[ParsedEvent]:
        """Take the next text; return what became certain."""
        if text:
            self._buffer.push(text)
            next(self._parsing)
        if is_last:
            self._buffer.close()
            next(self._parsing, None)
        events, self._events = self._events, []
        return events
