"""Llama 3: `{"name": ..., "parameters": {...}}`, or several, between them `;` or nothing; alone or after
`<|python_tag|>`."""

from collections.abc import Mapping
from typing import Any

from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import MAX_HELD, ToolParser
from services.frontend.tools.schema import calls_schema, json_format


class Llama3JSONParser(ToolParser):
    markers = openings = ("<|python_tag|>",)
    may_be_bare = True

    @classmethod
    def grammar(cls, tools: Mapping[str, Any], max_calls: int | None) -> dict[str, Any] | None:
        calls = calls_schema(tools, 1)
        one_call = json_format({**calls["items"], "$defs": calls["$defs"]})
        tag = {"type": "tag", "begin": "", "content": one_call, "end": ""}
        least = {"at_least_one": True, "stop_after_first": max_calls == 1}
        return {"type": "tags_with_separator", "tags": [tag], "separator": "; ", **least}

    def _calls(self, marker: str) -> Parsing[None]:
        while True:
            yield from self._call(strict=not marker)
            self._buffer.keep(MAX_HELD)
            char = yield from self._buffer.past_space()
            if char == ";":
                self._buffer.skip()
            elif char != "{":
                raise ParseError
