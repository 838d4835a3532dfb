"""Llama 4: `[name(key="value", other=[1, 2]), ...]`, alone or between `<|python_start|>` and `<|python_end|>`."""

import re

from services.frontend.parsing.json_reader import next_word, read_word
from services.frontend.parsing.python_reader import read_literal
from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import MAX_HELD, ToolParser
from services.frontend.tools.schema import MAX_NAME, NAME_CHAR

_WORD = re.compile(f"{NAME_CHAR}*")


class Llama4PythonicParser(ToolParser):
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
