"""Reasoning between `<think>` and `</think>`: text in, events out. No I/O, no clock."""

import enum
from collections.abc import Generator

from services.frontend.parsing.events import Content, Event, Reasoning
from services.frontend.parsing.json_reader import read_one_of, read_word
from services.frontend.parsing.text_buffer import Broken, Feed, Reading
from services.frontend.parsing.trimmer import Trimmer

OPENING, CLOSING = "<think>", "</think>"


class Begins(enum.Enum):
    """Where an answer begins."""

    INSIDE = "inside"
    """The prompt has opened the reasoning, or the model always reasons."""
    OUTSIDE = "outside"
    """The prompt has closed the reasoning."""
    PERHAPS = "perhaps"
    """Inside, if the opening tag comes first."""


class ThinkParser:
    """Of one answer. Line breaks next to the tags are the template's and belong to neither side."""

    def __init__(self, begins: Begins) -> None:
        self._begins = begins
        self._events: list[Event] = []
        self._feed = Feed()
        self._reading: Generator[None, None, None] = self._read()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        if text:
            self._feed.push(text)
            next(self._reading)
        return self._take()

    def finish(self) -> list[Event]:
        """Once no more text comes."""
        self._feed.close()
        next(self._reading, None)
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        feed, inside, first = self._feed, self._begins is Begins.INSIDE, ""
        closed = False
        if self._begins is not Begins.OUTSIDE:
            feed.keep()
            try:
                yield from feed.past_space()
                tag = yield from read_one_of(feed, (OPENING, CLOSING) if inside else (OPENING,))
                inside, closed = True, tag == CLOSING
            except Broken:
                first = feed.kept()
            feed.forget()
        if inside:
            if not closed:
                yield from self._inside(first)
            first = ""
            while (yield from feed.peek()) == "\n":
                feed.skip()
        self._say(Content(first))
        while (yield from feed.peek()):
            self._say(Content(feed.rest()))

    def _inside(self, first: str) -> Reading[None]:
        """Past the closing tag, or to the end of the text."""
        feed, trimmer, begun = self._feed, Trimmer("\n"), False
        text = first
        while True:
            shown = trimmer.push(text, begun) if text else ""
            begun = begun or bool(shown)
            self._say(Reasoning(shown))
            text = feed.until(CLOSING[0])
            if text:
                continue
            char = yield from feed.peek()
            if char != CLOSING[0]:
                if not char:
                    return
                continue
            feed.keep()
            try:
                yield from read_word(feed, CLOSING)
                return
            except Broken:
                text = feed.kept()
            finally:
                feed.forget()

    def _say(self, event: Content | Reasoning) -> None:
        if event.text:
            self._events.append(event)
