"""Llama 3: `{"name": ..., "parameters": {...}}`, several divided by `;`, alone or behind `<|python_tag|>`."""

from services.frontend.parsing.text_buffer import Broken, Reading
from services.frontend.tools.parser import MAX_HELD, ToolParser


class Llama3JSONParser(ToolParser):
    marks = ("<|python_tag|>",)

    def _read(self) -> Reading[None]:
        self._feed.keep(MAX_HELD)
        yield from self._attempt(self._calls(strict=True))
        while (yield from self._content_until("<|python_tag|>")):
            yield from self._attempt(self._calls(strict=False))

    def _calls(self, strict: bool) -> Reading[None]:
        while True:
            yield from self._call(strict)
            self._feed.keep(MAX_HELD)
            if (yield from self._feed.past_space()) != ";":
                raise Broken
            self._feed.skip()
