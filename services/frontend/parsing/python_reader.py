"""Python literals that grow, as JSON: strict, iterative, in linear time."""

import json
import re

from services.frontend.parsing.json_reader import MAX_DEPTH, MAX_NUMBER
from services.frontend.parsing.text_buffer import ParseError, Parsing, TextBuffer, read_whole

_WORD = re.compile("[a-zA-Z]*")
_NUMERAL = re.compile(r"[-+.0-9eE_]*")
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)")
_NUMBER = re.compile(r"([-+]?)([0-9]+)?(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\\": "\\", "'": "'", '"': '"', "/": "/"
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_literal(buffer: TextBuffer) -> Parsing[str]:
    """Read a text, number, word, list, tuple or dictionary; return it as JSON. Raises: ParseError"""
    parts: list[str] = []
    open_brackets: list[str] = []
    while True:
        char = yield from buffer.past_space()
        if open_brackets and char == open_brackets[-1]:  # empty, or after a last comma
            if parts[-1] == ", ":
                parts.pop()
        elif char in _CLOSING:
            if len(open_brackets) == MAX_DEPTH:
                raise ParseError
            buffer.skip()
            open_brackets.append(_CLOSING[char])
            parts.append("{" if char == "{" else "[")
            if char == "{" and (yield from buffer.past_space()) != "}":
                yield from _key(buffer, parts)
            continue
        else:
            parts.append((yield from _scalar(buffer, char)))
        while open_brackets:
            char = yield from buffer.past_space()
            buffer.skip() if char else None
            if char == ",":
                parts.append(", ")
                if open_brackets[-1] == "}" and (yield from buffer.past_space()) != "}":
                    yield from _key(buffer, parts)
                break
            if char != open_brackets[-1]:
                raise ParseError
            parts.append("}" if open_brackets.pop() == "}" else "]")
        else:
            return "".join(parts)


def _key(buffer: TextBuffer, parts: list[str]) -> Parsing[None]:
    char = yield from buffer.past_space()
    if char not in ("'", '"'):
        raise ParseError
    parts.append((yield from _string(buffer, char)))
    if (yield from buffer.past_space()) != ":":
        raise ParseError
    buffer.skip()
    parts.append(": ")


def _scalar(buffer: TextBuffer, char: str) -> Parsing[str]:
    if char and char in "'\"":
        return (yield from _string(buffer, char))
    text, pattern = "", _WORD if char.isalpha() else _NUMERAL
    while (yield from buffer.peek()) and (more := buffer.run(pattern)):
        text += more
        if len(text) > MAX_NUMBER:
            raise ParseError
    if pattern is _WORD:
        if text not in _WORDS:
            raise ParseError
        return _WORDS[text]
    return _number(text)


def _number(text: str) -> str:
    if _INTEGER.fullmatch(text):
        return text.lstrip("+").replace("_", "")
    match = _NUMBER.fullmatch(text)
    if match is None or not ((match[2] or "") + (match[3] or "").lstrip(".")):
        raise ParseError
    whole = (match[2] or "0").lstrip("0") or "0"
    fraction = (match[3] or "").rstrip(".")
    if fraction == "" and not match[4] and match[3] is None:
        raise ParseError  # 007 is no number
    return f"{match[1].lstrip('+')}{whole}{fraction or '.0'}{match[4] or ''}"


def _string(buffer: TextBuffer, quote: str) -> Parsing[str]:
    """Read a string; return it as JSON. Raises: ParseError"""
    buffer.skip()
    parts: list[str] = []
    plain = re.compile(rf"[^{quote}\\\n]*")
    while True:
        char = yield from buffer.peek()
        if char == quote:
            buffer.skip()
            break
        if char == "\\":
            parts.append((yield from _escape(buffer)))
        else:
            part = buffer.run(plain)
            if not part:
                raise ParseError
            parts.append(part)
    text = "".join(parts)
    # Two escapes may be the halves of one character.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(text, ensure_ascii=False)


def _escape(buffer: TextBuffer) -> Parsing[str]:
    buffer.skip()
    char = yield from buffer.peek()
    if not char:
        raise ParseError
    buffer.skip()
    if char not in _HEX:
        return _ESCAPES.get(char, "\\" + char)
    digits = ""
    while len(digits) < _HEX[char]:
        digit = yield from buffer.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise ParseError
        buffer.skip()
        digits += digit
    if int(digits, 16) > 0x10FFFF:
        raise ParseError
    return chr(int(digits, 16))


def literal_json(text: str) -> str:
    """Return a whole literal as JSON. Raises: ParseError"""
    return read_whole(text.strip(), read_literal)
