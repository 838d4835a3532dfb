"""GLM 4.5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

from services.frontend.parsing.json_reader import next_word, read_word
from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser
from services.frontend.tools.values import value_json

_KEY, _END = "<arg_key>", "</tool_call>"


class Glm45Parser(ToolParser):
    markers = ("<tool_call>", _END)
    openings = ("<tool_call>",)

    def _calls(self, marker: str) -> Parsing[None]:
        name = yield from self._short("<")
        tag = "<" + (yield from read_word(self._buffer, _KEY[1:], _END[1:]))
        self._start_object(name)
        while tag == _KEY:
            key = yield from self._short("</arg_key>")
            yield from next_word(self._buffer, "<arg_value>")
            value = yield from self._until("</arg_value>")
            self._add_argument(key, value_json(value, key, self._parameters.get(name)))
            tag = yield from next_word(self._buffer, _KEY, _END)
        self._end_object()
