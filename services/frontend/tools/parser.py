"""The ground on which the formats of tool calls stand: text in, events out. No I/O, no clock.

A call that never becomes whole is content, as it was written. An eager parser tells a call as soon as its name is known
and its arguments begin. What has been told cannot be taken back: of a call that breaks after that the told part stays,
and the rest is content. White space around calls belongs to neither.
"""

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import ClassVar

from services.frontend.parsing.events import Arguments, CallStart, Content, Event
from services.frontend.parsing.json_reader import decoded, read_one_of, read_string, read_value, read_word
from services.frontend.parsing.text_buffer import Broken, Feed, Reading
from services.frontend.parsing.trimmer import Trimmer

MAX_HELD = 65_536
"""Characters that may stand before a call's arguments, or be its arguments where they come before the name."""
MAX_NAME = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_SPACE = " \t\n\r"
_ARGUMENTS = ("arguments", "parameters")
_BESIDE_NAME = ("type", "id")


class ToolParser(ABC):
    """Of one answer."""

    marks: ClassVar[tuple[str, ...]] = ()
    """What the format writes around calls: perhaps special tokens, which are otherwise left out of the text."""

    def __init__(self, names: frozenset[str], eager: bool, most: int | None = None) -> None:
        """`names` are the tools on offer; calls beyond the first `most` are dropped."""
        self._names = names
        self._eager = eager
        self._most = most
        self.num_calls = 0
        """Calls that are whole."""
        self._index = 0
        """Of the call that is being read, or of the next one."""
        self._told: list[Event] | None = None
        """Of the call that is being read, once its name is known and its arguments begin: what is still to be told."""
        self._arguments_from: int | None = None
        """Where, in the newest piece, the arguments begin that have not been told."""
        self._events: list[Event] = []
        self._trimmer = Trimmer()
        self._has_content = self._has_calls = False
        self._is_after_call = False
        """Whether nothing but white space has come after a whole call."""
        self._feed = Feed()
        self._reading: Generator[None, None, None] = self._read()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._arguments_from is not None:
            self._arguments_from = 0
        self._feed.push(text)
        next(self._reading)
        self._tell_arguments()
        return self._take()

    def finish(self) -> list[Event]:
        """Once no more text comes."""
        self._feed.close()
        next(self._reading, None)
        if not self._has_calls and (space := self._trimmer.flush()):
            self._events.append(Content(space))
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _read(self) -> Reading[None]:
        """The format. It ends at the end of the text."""

    def _id(self) -> str:
        """Of a call; no two are equal."""
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    # What formats are made of.

    def _content(self, text: str) -> None:
        begun = self._has_content or not self._has_calls
        if shown := self._trimmer.push(text, begun):
            self._events.append(Content(shown))
            self._has_content, self._is_after_call = True, False

    def _content_until(self, *marks: str) -> Reading[str]:
        """Content up to one of `marks`, whose common first character does not return in them: which one; "" at the end
        of the text."""
        feed, first = self._feed, marks[0][0]
        while True:
            self._content(feed.until(first))
            char = yield from feed.peek()
            if not char:
                return ""
            if char != first:
                continue
            feed.keep(MAX_HELD)
            try:
                return (yield from read_one_of(feed, marks))
            except Broken:
                self._break()

    def _rest(self) -> Reading[None]:
        """Content up to the end."""
        while (yield from self._feed.peek()):
            self._content(self._feed.rest())

    def _attempt(self, reading: Reading[None]) -> Reading[None]:
        """Where it breaks, what has been kept but not been told is content."""
        try:
            yield from reading
        except Broken:
            self._break()
        self._feed.forget()

    def _break(self) -> None:
        self._tell_arguments()
        if self._told is None or not self._eager:
            self._content(self._feed.kept())
        else:
            self._index += 1
        self._told = self._arguments_from = None
        self._feed.forget()

    def _call(self, strict: bool = False) -> Reading[None]:
        """A call as an object with its name and its arguments. Raises: Broken

        Args:
            strict: the name must be one on offer, with little before it: nothing else marks this as a call.
        """
        feed, name, held = self._feed, "", ""
        yield from feed.past_space()
        yield from read_word(feed, "{")
        while True:
            yield from feed.past_space()
            key = decoded((yield from read_string(feed)))
            yield from feed.past_space()
            yield from read_word(feed, ":")
            yield from feed.past_space()
            if key == "name" and not name:
                name = yield from self._name(strict)
                if held:
                    self._start(name, held)
            elif key in _ARGUMENTS and not held and self._told is None:
                held = yield from self._arguments(name)
            elif strict and not name and key not in _BESIDE_NAME:
                raise Broken
            else:
                yield from read_value(feed)
            if (yield from feed.past_space()) == "}":
                break
            yield from read_word(feed, ",")
        if self._told is None:
            raise Broken
        feed.skip()
        self._end()

    def _list(self) -> Reading[None]:
        """Calls between brackets. Raises: Broken; calls that were whole before remain"""
        yield from self._feed.past_space()
        yield from read_word(self._feed, "[")
        while True:
            yield from self._call()
            self._feed.keep(MAX_HELD)
            if (yield from self._feed.past_space()) == "]":
                break
            yield from read_word(self._feed, ",")
        self._feed.skip()

    def _name(self, strict: bool) -> Reading[str]:
        name = decoded((yield from read_string(self._feed, 6 * MAX_NAME)))  # six: \u0041
        if NAME.fullmatch(name) is None or (strict and name not in self._names):
            raise Broken
        return name

    def _arguments(self, name: str) -> Reading[str]:
        """An object, or a string that holds one; returned if the name is not known yet. Raises: Broken"""
        feed = self._feed
        if (yield from feed.peek()) == '"':
            text = decoded((yield from read_string(feed))).strip(_SPACE)
            _check_object(text)
        elif name:
            yield from self._object(name)
            return ""
        else:
            if (yield from feed.peek()) != "{":
                raise Broken
            before = len(feed.kept())
            yield from read_value(feed)
            text = feed.kept()[before:]
        if name:
            self._start(name, text)
        return text

    def _object(self, name: str) -> Reading[None]:
        """Arguments, told as they come. Raises: Broken"""
        if (yield from self._feed.past_space()) != "{":
            raise Broken
        self._start(name)
        self._arguments_from = self._feed.position
        yield from read_value(self._feed)
        self._tell_arguments()
        self._arguments_from = None

    def _start(self, name: str, arguments: str = "") -> None:
        if self._eager:
            self._feed.forget()
            self._has_calls = True
        self._feed.lift_budget()
        self._told = []
        self._tell(CallStart(self._index, self._id(), name))
        if arguments:
            self._tell(Arguments(self._index, arguments))

    def _tell(self, event: Event) -> None:
        if self._told is None or (self._most is not None and self._index >= self._most):
            return
        (self._events if self._eager else self._told).append(event)

    def _tell_arguments(self) -> None:
        if self._arguments_from is None:
            return
        text = self._feed.since(self._arguments_from)
        self._arguments_from = self._feed.position
        if text:
            self._tell(Arguments(self._index, text))

    def _end(self) -> None:
        """The call is whole."""
        self._events += self._told or []
        self._told = None
        self._index += 1
        self.num_calls += 1
        self._has_calls = self._is_after_call = True
        self._feed.forget()


def _check_object(text: str) -> None:
    """Raises: Broken, if it is not the text of a JSON object and no more."""
    if not text.startswith("{"):
        raise Broken
    feed = Feed()
    feed.push(text)
    feed.close()
    for _ in read_value(feed):
        pass  # it cannot pause: the text is closed
    if feed.rest():
        raise Broken
