"""Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

from services.frontend.parsing.json_reader import next_word
from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser
from services.frontend.tools.values import value_json

_FUNCTION = "<function="


class Qwen3XMLParser(ToolParser):
    markers = ("<tool_call>", "</tool_call>")
    openings, closings = ("<tool_call>", _FUNCTION), ("</tool_call>",)

    def _calls(self, marker: str) -> Parsing[None]:
        if marker != _FUNCTION:
            yield from next_word(self._buffer, _FUNCTION)
        name = yield from self._short(">")
        self._start_object(name)
        while True:
            if (yield from next_word(self._buffer, "<parameter=", "</function>")) == "</function>":
                break
            key = yield from self._short(">")
            value = yield from self._until("</parameter>")
            text = value.removeprefix("\n").removesuffix("\n")
            self._add_argument(key, value_json(text, key, self._parameters.get(name)))
        self._end_object()
