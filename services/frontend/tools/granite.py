"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, with `<tool_call>` later, or without a mark."""

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser


class GraniteParser(ToolParser):
    markers = openings = ("<|tool_call|>", "<tool_call>")
    may_be_bare = True
    listed = "<|tool_call|>"

    def _calls(self, marker: str) -> Parsing[None]:
        return self._list(strict=not marker)
