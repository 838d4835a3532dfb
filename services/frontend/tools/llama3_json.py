"""Llama 3: `{"name": ..., "parameters": {...}}`, several separated by `;`, alone or after `<|python_tag|>`."""

from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import MAX_HELD, ToolParser


class Llama3JSONParser(ToolParser):
    markers = ("<|python_tag|>",)

    def _read(self) -> Parsing[None]:
        self._buffer.keep(MAX_HELD)
        yield from self._attempt(self._calls(strict=True))
        while (yield from self._content_until("<|python_tag|>")):
            yield from self._attempt(self._calls(strict=False))

    def _calls(self, strict: bool) -> Parsing[None]:
        while True:
            yield from self._call(strict)
            self._buffer.keep(MAX_HELD)
            if (yield from self._buffer.past_space()) != ";":
                raise ParseError
            self._buffer.skip()
