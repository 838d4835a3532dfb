"""Formats in which each argument of a call has marks around its name and its value."""

import re

from services.frontend.parsing.json_reader import next_word, pass_until, read_word
from services.frontend.parsing.python_reader import read_literal
from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import MAX_HELD, ToolParser
from services.frontend.tools.schema import MAX_NAME, NAME_CHAR
from services.frontend.tools.values import value_json

_WORD = re.compile(f"{NAME_CHAR}*")
_KEY, _CALL_END = "<arg_key>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_PARAMETER_END, _FUNCTION_END = "</parameter>", "</function>"


class Glm45Parser(ToolParser):
    """GLM 4.5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    markers = ("<tool_call>", _CALL_END)
    openings = ("<tool_call>",)

    def _calls(self, marker: str) -> Parsing[None]:
        name = yield from self._short("<")
        tag = "<" + (yield from read_word(self._buffer, _KEY[1:], _CALL_END[1:]))
        self._start_object(name)
        while tag == _KEY:
            key = yield from self._short("</arg_key>")
            yield from next_word(self._buffer, "<arg_value>")
            value = yield from self._until("</arg_value>")
            self._add_argument(key, value_json(value, key, self._parameters.get(name)))
            tag = yield from next_word(self._buffer, _KEY, _CALL_END)
        self._end_object()


class Qwen3XMLParser(ToolParser):
    """Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    markers = ("<tool_call>", _CALL_END)
    openings, closings = ("<tool_call>", _FUNCTION), (_CALL_END,)

    def _calls(self, marker: str) -> Parsing[None]:
        buffer = self._buffer
        if marker != _FUNCTION:
            yield from next_word(buffer, _FUNCTION)
        name = yield from self._short(">")
        self._start_object(name)
        mark = yield from next_word(buffer, _PARAMETER, _FUNCTION_END)
        while mark == _PARAMETER:
            key = yield from self._short(">")
            value, mark = yield from self._value()
            text = value.removeprefix("\n").removesuffix("\n")
            self._add_argument(key, value_json(text, key, self._parameters.get(name)))
            if mark == _PARAMETER_END:
                mark = yield from next_word(buffer, _PARAMETER, _FUNCTION_END)
        self._end_object()

    def _value(self) -> Parsing[tuple[str, str]]:
        """Return a value and the mark behind it. Models omit `</parameter>`, so another mark at the beginning of a line
        ends a value, too. Raises: ParseError"""
        parts: list[str] = []
        ends = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
        while mark := (yield from pass_until(self._buffer, ends, parts.append)):
            if mark == _PARAMETER_END or (parts and parts[-1].endswith("\n")):
                return "".join(parts), mark
            parts.append(mark)
        raise ParseError


class Llama4PythonicParser(ToolParser):
    """Llama 4: `[name(key="value", other=[1, 2]), ...]`, alone or between `<|python_start|>` and `<|python_end|>`."""

    markers = ("<|python_start|>", "<|python_end|>")
    openings, closings = markers[:1], markers[1:]
    may_be_bare = True

    def _calls(self, marker: str) -> Parsing[None]:
        """Without a mark, names must be known, as nothing else shows that these are calls."""
        buffer = self._buffer
        yield from next_word(buffer, "[")
        while True:
            yield from buffer.past_space()
            name = yield from self._word()
            if not marker and name not in self._names:
                raise ParseError
            yield from read_word(buffer, "(")
            self._start_object(name)
            yield from self._keywords()
            self._end_object()
            buffer.keep(MAX_HELD)
            if (yield from next_word(buffer, ",", "]")) == "]":
                return

    def _keywords(self) -> Parsing[None]:
        buffer = self._buffer
        while (yield from buffer.past_space()) != ")":
            key = yield from self._word()
            yield from next_word(buffer, "=")
            value = yield from read_literal(buffer)
            self._add_argument(key, value)
            if (yield from next_word(buffer, ",", ")")) == ")":
                return
        buffer.skip()

    def _word(self) -> Parsing[str]:
        text = yield from self._buffer.whole_run(_WORD, MAX_NAME)
        if not text:
            raise ParseError
        return text
