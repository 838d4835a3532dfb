"""Parsers of JSON that grows: strict, iterative, in linear time."""

import json
import re
from collections.abc import Callable, Sequence

from services.frontend.json_text import MAX_DEPTH
from services.frontend.parsing.text_buffer import ParseError, Parsing, TextBuffer, read_whole

MAX_NUMBER = 1024
"""Characters."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMERAL = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}


def read_word(buffer: TextBuffer, *words: str) -> Parsing[str]:
    """Read one of `words`, none of which is the beginning of another, and return it. Raises: ParseError"""
    found = yield from _beginning(buffer, words)
    if found not in words:
        raise ParseError
    return found


def next_word(buffer: TextBuffer, *words: str) -> Parsing[str]:
    """Read white space and one of `words`, as `read_word`. Raises: ParseError"""
    yield from buffer.past_space()
    return (yield from read_word(buffer, *words))


def _beginning(buffer: TextBuffer, words: Sequence[str]) -> Parsing[str]:
    """Read one of `words`, or as much as one of them begins with; return what was read."""
    found = ""
    while found not in words:
        char = yield from buffer.peek()
        if not char or not any(word.startswith(found + char) for word in words):
            break
        buffer.skip()
        found += char
    return found


def pass_until(buffer: TextBuffer, words: Sequence[str], add: Callable[[str], object]) -> Parsing[str]:
    """Pass the text before one of `words` to `add`; return the word, "" at the end of the text.

    Args:
        words: all begin with the same character, which does not occur again in them.
    """
    while True:
        if text := buffer.until(words[0][0]):
            add(text)
        if (found := (yield from _beginning(buffer, words))) in words:
            return found
        if found:
            add(found)
        elif not (yield from buffer.peek()):
            return ""


def read_string(buffer: TextBuffer, max_chars: int | None = None) -> Parsing[str]:
    """Read a string; return it as written, with quotes. Raises: ParseError, also for more than `max_chars`"""
    yield from read_word(buffer, '"')
    parts, size = ['"'], 0
    while True:
        char = yield from buffer.peek()
        if char == '"':
            buffer.skip()
            return "".join(parts) + '"'
        if char == "\\":
            part = yield from _escape(buffer)
        else:
            part = buffer.run(_PLAIN)
        size += len(part)
        if not part or (max_chars is not None and size > max_chars):
            raise ParseError
        parts.append(part)


def _escape(buffer: TextBuffer) -> Parsing[str]:
    buffer.skip()
    char = yield from buffer.peek()
    if not char or char not in '"\\/bfnrtu':
        raise ParseError
    buffer.skip()
    text = "\\" + char
    for _ in range(4 if char == "u" else 0):
        digit = yield from buffer.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise ParseError
        buffer.skip()
        text += digit
    return text


def read_text(buffer: TextBuffer, max_chars: int | None = None) -> Parsing[str]:
    """Read a string as `read_string`; return its value. Raises: ParseError, also if it has a lone surrogate"""
    text: str = json.loads((yield from read_string(buffer, max_chars)))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ParseError from None
    return text


def check_value(text: str) -> None:
    """Raises: ParseError, if the text is not exactly one JSON value"""
    read_whole(text, read_value)


def read_value(buffer: TextBuffer) -> Parsing[None]:
    """Read one JSON value. Raises: ParseError"""
    open_brackets: list[str] = []
    """Closing brackets of the objects and arrays that are open."""
    while True:
        char = yield from buffer.past_space()
        if char == "{" or char == "[":
            if len(open_brackets) == MAX_DEPTH:
                raise ParseError
            closing = "}" if char == "{" else "]"
            buffer.skip()
            if (yield from buffer.past_space()) != closing:
                open_brackets.append(closing)
                if closing == "}":
                    yield from _read_key(buffer)
                continue
            buffer.skip()
        elif char == '"':
            yield from read_string(buffer)
        elif char in _WORDS:
            yield from read_word(buffer, _WORDS[char])
        elif _NUMBER.fullmatch((yield from buffer.whole_run(_NUMERAL, MAX_NUMBER))) is None:
            raise ParseError
        while open_brackets:  # the value was an item of the innermost bracket
            char = yield from buffer.past_space()
            if char == ",":
                buffer.skip()
                if open_brackets[-1] == "}":
                    yield from _read_key(buffer)
                break
            if char != open_brackets.pop():
                raise ParseError
            buffer.skip()
        else:
            return


def _read_key(buffer: TextBuffer) -> Parsing[None]:
    yield from buffer.past_space()
    yield from read_string(buffer)
    yield from next_word(buffer, ":")
