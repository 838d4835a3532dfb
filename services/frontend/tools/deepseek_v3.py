"""DeepSeek V3: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a fence with JSON, `<｜tool▁call▁end｜>`."""

from services.frontend.parsing.json_reader import next_word
from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import MAX_HELD, NAME, ToolParser

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekV3Parser(ToolParser):
    markers = (_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END)
    openings = (_CALLS,)

    def _calls(self, marker: str) -> Parsing[None]:
        buffer = self._buffer
        yield from next_word(buffer, _CALL)
        while True:
            yield from self._fenced()
            buffer.keep(MAX_HELD)
            yield from next_word(buffer, _FENCE)
            yield from next_word(buffer, _CALL_END)
            if (yield from next_word(buffer, _CALL, _CALLS_END)) == _CALLS_END:
                return
            buffer.keep(MAX_HELD)

    def _fenced(self) -> Parsing[None]:
        yield from self._short(_SEPARATOR)  # the kind, which is "function"
        name = yield from self._short("\n")
        if NAME.fullmatch(name) is None:
            raise ParseError
        yield from next_word(self._buffer, f"{_FENCE}json")
        yield from self._object(name)
        self._end()
