"""Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, with `<tool_call>` later, or without a mark."""

from collections.abc import Mapping
from typing import Any

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import MAX_HELD, ToolParser
from services.frontend.tools.schema import list_format


class GraniteParser(ToolParser):
    markers = ("<|tool_call|>", "<tool_call>")

    @classmethod
    def grammar(cls, tools: Mapping[str, Any], max_calls: int | None) -> dict[str, Any] | None:
        return list_format("<|tool_call|>", tools, max_calls)

    def _read(self) -> Parsing[None]:
        self._buffer.keep(MAX_HELD)
        yield from self._attempt(self._list(strict=True))
        while (yield from self._content_until(*self.markers)):
            yield from self._attempt(self._list())
