"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
from collections.abc import Mapping
from typing import Any

from services.frontend.parsing.text_buffer import Parsing
from services.frontend.tools.parser import ToolParser
from services.frontend.tools.schema import arguments_schema, json_format


class HermesParser(ToolParser):
    markers = ("<tool_call>", "</tool_call>")
    openings, closings = markers[:1], markers[1:]

    @classmethod
    def grammar(cls, tools: Mapping[str, Any], max_calls: int | None) -> dict[str, Any] | None:
        opening, closing = cls.markers
        calls = []
        for name, parameters in tools.items():
            head = {"type": "const_string", "value": f'\n{{"name": {json.dumps(name)}, "arguments": '}
            content = {"type": "sequence", "elements": [head, json_format(arguments_schema(parameters))]}
            rest = {"type": "tag", "begin": "", "content": content, "end": "}\n"}
            calls.append({"type": "sequence", "elements": [rest, {"type": "const_string", "value": closing}]})
        any_call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
        tag = {"type": "tag", "begin": opening, "content": any_call, "end": ""}
        least = {"at_least_one": True, "stop_after_first": max_calls == 1}
        return {"type": "tags_with_separator", "tags": [tag], "separator": "\n", **least}

    def _calls(self, marker: str) -> Parsing[None]:
        return self._call()
