"""Phi 4 mini: `functools[{"name": ..., "arguments": {...}}, ...]`."""

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser


class Phi4MiniParser(ToolParser):
    markers = ("functools",)

    def _read(self) -> Parsing[None]:
        while (yield from self._content_until("functools")):
            yield from self._attempt(self._list())
