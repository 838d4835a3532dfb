"""Text that arrives in chunks, for parsers written as generators: they yield while they need more text.

A parser sees the same characters and decides the same, however the text is cut into chunks. Each character is read a
bounded number of times.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Parsing = Generator[None, None, T]
"""A parser that returns T; it yields when the buffer is empty and not closed."""

SPACE = re.compile(r"[ \t\n\r]*")
"""JSON's white space."""


class ParseError(Exception):
    """The text does not match the format. Parsing continues, as another format, where this was noticed."""


class TextBuffer:
    """Unread text, and on request a copy of the text that was read."""

    def __init__(self) -> None:
        self._text = ""
        """The last chunk, with the unread text of earlier ones."""
        self._at = 0
        self._closed = False
        self._kept: list[str] | None = None
        self._kept_from = 0
        self._budget: int | None = None

    def push(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(self._text[self._kept_from : self._at])
        self._text, self._kept_from = self._text[self._at :] + text, 0
        self._at = 0

    def close(self) -> None:
        """Mark the end of the text."""
        self._closed = True

    @property
    def has_ended(self) -> bool:
        """True if all text is read, and no more follows."""
        return self._closed and self._at == len(self._text)

    def peek(self) -> Parsing[str]:
        """Return the next character without reading it, "" at the end. Raises: ParseError, if the budget is used up"""
        if self._budget == 0:
            raise ParseError
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> None:
        """Read the character that `peek` returned."""
        self._advance(1)

    def _advance(self, size: int) -> None:
        self._at += size
        if self._budget is not None:
            self._budget -= size

    def run(self, allowed: re.Pattern[str]) -> str:
        """Read the available part of the longest run that matches `allowed`, a repeated class of characters."""
        limit = len(self._text) if self._budget is None else min(len(self._text), self._at + self._budget)
        match = allowed.match(self._text, self._at, limit)
        found = match[0] if match else ""
        self._advance(len(found))
        return found

    def whole_run(self, allowed: re.Pattern[str], most: int) -> Parsing[str]:
        """Read the longest run that matches `allowed`. Raises: ParseError, if it has more than `most` characters"""
        text = ""
        while (yield from self.peek()) and (more := self.run(allowed)):
            text += more
            if len(text) > most:
                raise ParseError
        return text

    def until(self, char: str) -> str:
        """Read the available text before `char`."""
        found = self._text.find(char, self._at)
        start, self._at = self._at, len(self._text) if found < 0 else found
        return self._text[start : self._at]

    def rest(self) -> str:
        """Read all available text."""
        start, self._at = self._at, len(self._text)
        return self._text[start:]

    def past_space(self) -> Parsing[str]:
        """Read white space; return the next character without reading it, "" at the end. Raises: ParseError"""
        while (char := (yield from self.peek())) and char in " \t\n\r":
            self.run(SPACE)
        return char

    def keep(self, budget: int | None = None) -> None:
        """Keep a copy of the text read from here on. Reading more than `budget` characters raises ParseError."""
        self._kept, self._kept_from, self._budget = [], self._at, budget

    def kept(self) -> str:
        """Return the text that was read since `keep`; "" if none is kept."""
        return "" if self._kept is None else "".join(self._kept) + self._text[self._kept_from : self._at]

    def lift_budget(self) -> None:
        self._budget = None

    def drop_kept(self) -> None:
        """Stop keeping the text; lift the budget."""
        self._kept = self._budget = None

    @property
    def position(self) -> int:
        """Position in the last chunk, for `since`."""
        return self._at

    def since(self, position: int) -> str:
        return self._text[position : self._at]


class Trimmer:
    """Text without the white space at its ends, while it grows."""

    def __init__(self, space: str = " \t\n\r") -> None:
        self._space = space
        self._held: list[str] = []
        self._has_begun = False
        """Text was returned, so that white space before more text belongs to it."""

    def push(self, text: str, keeps_begin: bool = False) -> str:
        """Return the text up to the last character that is not white space.

        Args:
            keeps_begin: white space at the beginning belongs to the text, too.
        """
        stripped = text.rstrip(self._space)
        if not stripped:
            self._held.append(text)
            return ""
        keeps = keeps_begin or self._has_begun
        shown = self.flush() + stripped if keeps else stripped.lstrip(self._space)
        self._held, self._has_begun = [text[len(stripped) :]], True
        return shown

    def flush(self) -> str:
        """Return the white space that was held back."""
        held, self._held = "".join(self._held), []
        return held


def read_whole(text: str, reader: Callable[[TextBuffer], Parsing[T]]) -> T:
    """Return what `reader` reads in a complete text. Raises: ParseError, also if it leaves a rest"""
    buffer = TextBuffer()
    buffer.push(text)
    buffer.close()
    values: list[T] = []

    def read() -> Parsing[None]:
        values.append((yield from reader(buffer)))

    for _ in read():
        pass  # it never yields, as the buffer is closed
    if buffer.rest():
        raise ParseError
    return values[0]
