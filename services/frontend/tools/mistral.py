"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and later `[TOOL_CALLS]name{...}`."""

import re
import secrets
import string

from services.frontend.parsing.json_reader import read_word
from services.frontend.parsing.text_buffer import Broken, Reading
from services.frontend.tools.parser import NAME, ToolParser

_WORD = re.compile("[a-zA-Z0-9_.-]*")


class MistralParser(ToolParser):
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def _id(self) -> str:
        """Mistral's templates take no others back."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def _read(self) -> Reading[None]:
        while (yield from self._content_until("[TOOL_CALLS]")):
            yield from self._attempt(self._marked())

    def _marked(self) -> Reading[None]:
        char = yield from self._feed.past_space()
        if char == "[":
            yield from self._list()
        elif char == "{":
            yield from self._call()
        else:
            yield from self._named()

    def _named(self) -> Reading[None]:
        name = yield from self._word()
        if NAME.fullmatch(name) is None:
            raise Broken
        while (yield from self._feed.peek()) == "[":
            self._feed.skip()
            if (yield from self._feed.peek()) == "C":
                yield from read_word(self._feed, "CALL_ID]")
                yield from self._word()
            else:
                yield from read_word(self._feed, "ARGS]")
        yield from self._object(name)
        self._end()

    def _word(self) -> Reading[str]:
        text = ""
        while (yield from self._feed.peek()) and (more := self._feed.run(_WORD)):
            text += more
        return text
