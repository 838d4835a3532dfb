"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser


class HermesParser(ToolParser):
    markers = ("<tool_call>", "</tool_call>")

    def _read(self) -> Parsing[None]:
        opening, _ = self.markers
        while marker := (yield from self._content_until(*self.markers)):
            if marker == opening:
                yield from self._attempt(self._call())
            elif self._is_after_call:
                self._is_after_call = False
                self._buffer.drop_kept()
            else:
                self._break()
