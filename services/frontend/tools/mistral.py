"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and later `[TOOL_CALLS]name{...}`."""

import re
import secrets
import string

from services.frontend.parsing.json_reader import read_word
from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import NAME, ToolParser
from services.frontend.tools.schema import MAX_NAME, NAME_CHAR

_WORD = re.compile(f"{NAME_CHAR}*")


class MistralParser(ToolParser):
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
        name = yield from self._buffer.whole_run(_WORD, MAX_NAME)
        if NAME.fullmatch(name) is None:
            raise ParseError
        while (yield from self._buffer.peek()) == "[":
            if (yield from read_word(self._buffer, "[CALL_ID]", "[ARGS]")) == "[CALL_ID]":
                yield from self._buffer.whole_run(_WORD, MAX_NAME)
        yield from self._object(name)
        self._end()
