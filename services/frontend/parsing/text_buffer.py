"""Text that arrives in pieces, for readers that are generators: they pause where there is no more yet.

However the text is cut, a reader sees the same characters and decides the same. Each character is looked at a bounded
number of times.
"""

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

SPACE = re.compile(r"[ \t\n\r]*")
"""JSON's white space."""


class Broken(Exception):
    """The text is not what a reader was made for. Where that is noticed is where others go on reading."""


class Feed:
    def __init__(self) -> None:
        self._text = ""
        """The newest piece; those before it have been read."""
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
        """Nothing follows."""
        self._closed = True

    def peek(self) -> Reading[str]:
        """The next character, "" at the end of the text. Raises: Broken, when the budget is spent"""
        if self._budget == 0:
            raise Broken
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def skip(self) -> None:
        """Past the character that `peek` showed."""
        self._advance(1)

    def _advance(self, size: int) -> None:
        self._at += size
        if self._budget is not None:
            self._budget -= size

    def run(self, allowed: re.Pattern[str]) -> str:
        """What has come of the longest run that matches `allowed`, a repeated class of characters; perhaps ""."""
        limit = len(self._text) if self._budget is None else min(len(self._text), self._at + self._budget)
        match = allowed.match(self._text, self._at, limit)
        found = match[0] if match else ""
        self._advance(len(found))
        return found

    def until(self, char: str) -> str:
        """What has come before `char`."""
        found = self._text.find(char, self._at)
        start, self._at = self._at, len(self._text) if found < 0 else found
        return self._text[start : self._at]

    def rest(self) -> str:
        """What has come."""
        start, self._at = self._at, len(self._text)
        return self._text[start:]

    def past_space(self) -> Reading[str]:
        """The next character that is no white space, "" at the end. Raises: Broken"""
        while (char := (yield from self.peek())) and char in " \t\n\r":
            self.run(SPACE)
        return char

    def keep(self, budget: int | None = None) -> None:
        """From here on, what is read can be had again; reading more than `budget` characters raises Broken."""
        self._kept, self._kept_from, self._budget = [], self._at, budget

    def kept(self) -> str:
        assert self._kept is not None
        return "".join(self._kept) + self._text[self._kept_from : self._at]

    def lift_budget(self) -> None:
        self._budget = None

    def forget(self) -> None:
        self._kept = self._budget = None

    @property
    def position(self) -> int:
        """In the newest piece, for `since`."""
        return self._at

    def since(self, position: int) -> str:
        return self._text[position : self._at]
