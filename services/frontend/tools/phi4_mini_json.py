"""Phi 4 mini: `functools[{"name": ..., "arguments": {...}}, ...]`."""

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser


class Phi4MiniParser(ToolParser):
    markers = openings = ("functools",)
    listed = "functools"

    def _calls(self, marker: str) -> Parsing[None]:
        return self._list()
