"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from services.frontend.parsing.text_buffer import Reading
from services.frontend.tools.parser import ToolParser


class HermesParser(ToolParser):
    marks = ("<tool_call>", "</tool_call>")

    def _read(self) -> Reading[None]:
        opening, _ = self.marks
        while mark := (yield from self._content_until(*self.marks)):
            if mark == opening:
                yield from self._attempt(self._call())
            elif self._is_after_call:
                self._is_after_call = False
                self._feed.forget()
            else:
                self._break()
