"""Formats in which the arguments of a call are a JSON object; most have the name beside them, in one more object."""

import json
import re
import secrets
import string
from collections.abc import Mapping
from typing import Any

from services.frontend.parsing.json_reader import next_word, read_word
from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import MAX_HELD, NAME, ToolParser
from services.frontend.tools.schema import MAX_NAME, NAME_CHAR, arguments_schema, calls_schema, json_format

_WORD = re.compile(f"{NAME_CHAR}*")
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```"


class RequiredParser(ToolParser):
    """`[{"name": ..., "parameters": {...}}, ...]`: a grammar writes it if the request requires calls. Of a call that is
    cut off, the name and the arguments so far are returned, and nothing is content."""

    may_be_bare = True

    def _break(self) -> None:
        if self._buffer.has_ended:
            self._emit_arguments()
            self._events += self._pending or []
            self._buffer.drop_kept()
        super()._break()


class NamedParser(RequiredParser):
    """Only the arguments, of the one tool that may be called: a grammar writes it if the request names the tool."""

    def _calls(self, marker: str) -> Parsing[None]:
        (name,) = self._names
        yield from self._object(name)
        self._end()


class GraniteParser(ToolParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, with `<tool_call>` later, or without a
    mark."""

    markers = openings = ("<|tool_call|>", "<tool_call>")
    may_be_bare = True
    listed = "<|tool_call|>"


class Phi4MiniParser(ToolParser):
    """Phi 4 mini: `functools[{"name": ..., "arguments": {...}}, ...]`."""

    markers = openings = ("functools",)
    listed = "functools"


class HermesParser(ToolParser):
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

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
        return _separated(opening, calls, "\n", max_calls)

    def _calls(self, marker: str) -> Parsing[None]:
        return self._call()


class Llama3JSONParser(ToolParser):
    """Llama 3: `{"name": ..., "parameters": {...}}`, or several, between them `;` or nothing; alone or after
    `<|python_tag|>`."""

    markers = openings = ("<|python_tag|>",)
    may_be_bare = True

    @classmethod
    def grammar(cls, tools: Mapping[str, Any], max_calls: int | None) -> dict[str, Any] | None:
        calls = calls_schema(tools, 1)
        return _separated("", [json_format({**calls["items"], "$defs": calls["$defs"]})], "; ", max_calls)

    def _calls(self, marker: str) -> Parsing[None]:
        while True:
            yield from self._call(strict=not marker)
            self._buffer.keep(MAX_HELD)
            char = yield from self._buffer.past_space()
            if char == ";":
                self._buffer.skip()
            elif char != "{":
                raise ParseError


class MistralParser(ToolParser):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and later `[TOOL_CALLS]name{...}`."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    openings = ("[TOOL_CALLS]",)
    listed = "[TOOL_CALLS]"

    def _id(self) -> str:
        """Return an id of the only form that Mistral's templates accept."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _calls(self, marker: str) -> Parsing[None]:
        char = yield from self._buffer.past_space()
        if char == "[":
            yield from self._list()
        elif char == "{":
            yield from self._call()
        else:
            yield from self._named()

    def _named(self) -> Parsing[None]:
        name = yield from self._buffer.whole_run(_WORD, MAX_NAME)  # without one, no object follows
        while (yield from self._buffer.peek()) == "[":
            if (yield from read_word(self._buffer, "[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
                yield from self._buffer.whole_run(_WORD, MAX_NAME)
        yield from self._object(name)
        self._end()


class DeepSeekV3Parser(ToolParser):
    """DeepSeek V3: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME`, a fence with JSON, `<｜tool▁call▁end｜>`."""

    markers = (_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END)
    openings = (_CALLS,)

    def _calls(self, marker: str) -> Parsing[None]:
        buffer = self._buffer
        yield from next_word(buffer, _CALL)
        while True:
            yield from self._fenced()
            buffer.keep(MAX_HELD)
            yield from next_word(buffer, _FENCE)
            yield from next_word(buffer, _CALL_END)
            if (yield from next_word(buffer, _CALL, _CALLS_END)) == _CALLS_END:
                return
            buffer.keep(MAX_HELD)

    def _fenced(self) -> Parsing[None]:
        yield from self._short(_SEPARATOR)  # the kind, which is "function"
        name = yield from self._short("\n")
        if NAME.fullmatch(name) is None:
            raise ParseError
        yield from next_word(self._buffer, f"{_FENCE}json")
        yield from self._object(name)
        self._end()


def _separated(begin: str, calls: list[dict[str, Any]], separator: str, max_calls: int | None) -> dict[str, Any]:
    """Return the format of one or several calls, each behind `begin` and in one of these forms."""
    any_call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    tag = {"type": "tag", "begin": begin, "content": any_call, "end": ""}
    least = {"at_least_one": True, "stop_after_first": max_calls == 1}
    return {"type": "tags_with_separator", "tags": [tag], "separator": separator, **least}
