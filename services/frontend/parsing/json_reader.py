"""JSON as it grows: strict, iterative, in linear time."""

import json
import re
from collections.abc import Sequence

from services.frontend.parsing.text_buffer import Broken, Feed, Reading

MAX_DEPTH = 128
MAX_NUMBER = 1024
"""Characters."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMERAL = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}


def read_word(feed: Feed, word: str) -> Reading[None]:
    """Exactly these characters. Raises: Broken"""
    for expected in word:
        if (yield from feed.peek()) != expected:
            raise Broken
        feed.skip()


def read_one_of(feed: Feed, words: Sequence[str]) -> Reading[str]:
    """One of `words`, none of which begins another. Raises: Broken"""
    found = ""
    while found not in words:
        char = yield from feed.peek()
        words = [word for word in words if word.startswith(found + char)] if char else []
        if not words:
            raise Broken
        feed.skip()
        found += char
    return found


def read_string(feed: Feed, most: int | None = None) -> Reading[str]:
    """A string, as it was written, quotes included; with more than `most` characters it is none. Raises: Broken"""
    yield from read_word(feed, '"')
    parts, size = ['"'], 0
    while True:
        char = yield from feed.peek()
        if char == '"':
            feed.skip()
            return "".join(parts) + '"'
        if char == "\\":
            part = yield from _escape(feed)
        else:
            part = feed.run(_PLAIN)
        size += len(part)
        if not part or (most is not None and size > most):
            raise Broken
        parts.append(part)


def _escape(feed: Feed) -> Reading[str]:
    feed.skip()
    char = yield from feed.peek()
    if not char or char not in '"\\/bfnrtu':
        raise Broken
    feed.skip()
    text = "\\" + char
    for _ in range(4 if char == "u" else 0):
        digit = yield from feed.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise Broken
        feed.skip()
        text += digit
    return text


def decoded(string: str) -> str:
    """Of a string as `read_string` gives it. Raises: Broken, where it holds halves of characters"""
    text: str = json.loads(string)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Broken from None
    return text


def _read_number(feed: Feed) -> Reading[None]:
    text = ""
    while (char := (yield from feed.peek())) and char in "-+.0123456789eE":
        text += feed.run(_NUMERAL)
        if len(text) > MAX_NUMBER:
            raise Broken
    if _NUMBER.fullmatch(text) is None:
        raise Broken


def read_value(feed: Feed) -> Reading[None]:
    """Past one JSON value. Raises: Broken"""
    open_ones: list[str] = []
    while True:
        char = yield from feed.past_space()
        if char == "{" or char == "[":
            if len(open_ones) == MAX_DEPTH:
                raise Broken
            closing = "}" if char == "{" else "]"
            feed.skip()
            if (yield from feed.past_space()) != closing:
                open_ones.append(closing)
                if closing == "}":
                    yield from _read_key(feed)
                continue
            feed.skip()
        elif char == '"':
            yield from read_string(feed)
        elif char in _WORDS:
            yield from read_word(feed, _WORDS[char])
        else:
            yield from _read_number(feed)
        while open_ones:  # the value was an item: what follows it?
            char = yield from feed.past_space()
            if char == ",":
                feed.skip()
                if open_ones[-1] == "}":
                    yield from _read_key(feed)
                break
            if char != open_ones.pop():
                raise Broken
            feed.skip()
        else:
            return


def _read_key(feed: Feed) -> Reading[None]:
    yield from feed.past_space()
    yield from read_string(feed)
    yield from feed.past_space()
    yield from read_word(feed, ":")
