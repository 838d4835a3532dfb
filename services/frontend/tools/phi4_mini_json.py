"""Phi 4 mini: `functools[{"name": ..., "arguments": {...}}, ...]`."""

from collections.abc import Mapping
from typing import Any

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser
from services.frontend.tools.schema import list_format


class Phi4MiniParser(ToolParser):
    markers = ("functools",)

    @classmethod
    def grammar(cls, tools: Mapping[str, Any], max_calls: int | None) -> dict[str, Any] | None:
        return list_format("functools", tools, max_calls)

    def _read(self) -> Parsing[None]:
        while (yield from self._content_until("functools")):
            yield from self._attempt(self._list())
