"""Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from services.frontend.parsing.json_reader import next_word, pass_until
from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import ToolParser
from services.frontend.tools.values import value_json

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_PARAMETER_END, _FUNCTION_END = "</parameter>", "</function>"


class Qwen3XMLParser(ToolParser):
    markers = ("<tool_call>", "</tool_call>")
    openings, closings = ("<tool_call>", _FUNCTION), ("</tool_call>",)

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
