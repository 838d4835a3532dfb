"""Python literals that grow, as JSON: Python's own parser reads each one when it is complete."""

import ast
import json
import re
from typing import Any

from services.frontend.parsing.json_reader import MAX_NUMBER
from services.frontend.parsing.text_buffer import ParseError, Parsing, TextBuffer, read_whole

_SCALAR = re.compile(r"[-+.\w]*", re.ASCII)
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_ESCAPED = frozenset("\\'\"abfnrtv01234567xuU")
"""Characters that Python gives a meaning behind a backslash."""
_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which models write in place of Python's."""


def read_literal(buffer: TextBuffer) -> Parsing[str]:
    """Read a text, number, word, list, tuple or dictionary; return it as JSON. Raises: ParseError"""
    parts: list[str] = []
    open_brackets: list[str] = []
    while True:
        char = yield from buffer.past_space()
        if char and char in "'\"":
            parts.append((yield from _string(buffer, char)))
        elif char in _CLOSING or (open_brackets and char in (",", ":", open_brackets[-1])):
            buffer.skip()
            parts.append(char)
            if char in _CLOSING:
                open_brackets.append(_CLOSING[char])
            elif char == open_brackets[-1]:
                open_brackets.pop()
        else:
            parts.append((yield from buffer.whole_run(_SCALAR, MAX_NUMBER)))
            if not parts[-1]:
                raise ParseError
        if not open_brackets:
            break
    try:
        value = _value(ast.parse(" ".join(parts), mode="eval").body)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ParseError from None


def _value(node: ast.expr) -> Any:
    """Raises: ValueError, if JSON has no such value"""
    match node:
        case ast.Constant(value=str(text)):  # two escapes may be the halves of one character
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.Constant(value=int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(map(_value, filter(None, keys)), map(_value, values), strict=True))
    raise ValueError


def _string(buffer: TextBuffer, quote: str) -> Parsing[str]:
    """Read a string; return it as Python writes it. Raises: ParseError"""
    buffer.skip()
    parts, plain = [quote], re.compile(rf"[^{quote}\\\n]*")
    while (char := (yield from buffer.peek())) != quote:
        if char != "\\":
            parts.append(buffer.run(plain))
            if not parts[-1]:
                raise ParseError
            continue
        buffer.skip()
        escaped = yield from buffer.peek()
        buffer.skip() if escaped else None
        parts.append("/" if escaped == "/" else f"\\{escaped}" if escaped in _ESCAPED else f"\\\\{escaped}")
    buffer.skip()
    return "".join(parts) + quote


def literal_json(text: str) -> str:
    """Return a whole literal as JSON. Raises: ParseError"""
    return read_whole(text.strip(), read_literal)
