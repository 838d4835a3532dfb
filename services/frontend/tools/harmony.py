"""gpt-oss: messages `<|start|>ROLE<|channel|>CHANNEL to=RECIPIENT<|message|>TEXT<|end|>`.

The channel `analysis` is reasoning; a message to `functions.NAME`, or to the name of a tool, is a call; all others are
content. Source of the format: OpenAI's description of the Harmony response format.
"""

import re

from services.frontend.parsing.events import Reasoning
from services.frontend.parsing.json_reader import next_word, pass_until
from services.frontend.parsing.text_buffer import ParseError, Parsing
from services.frontend.tools.parser import MAX_HELD, ToolParser
from services.frontend.tools.schema import MAX_NAME

_START, _CHANNEL, _MESSAGE, _TO = "<|start|>", "<|channel|>", "<|message|>", "to=functions."
_HEADS = (_START, _CHANNEL, _TO)
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_RECIPIENT = re.compile(rf"\bto=(functions\.)?([\w.-]{{1,{MAX_NAME}}})")
_NAME_OF_CHANNEL = re.compile(r"\s*(\w*)")


class HarmonyParser(ToolParser):
    markers = (_CHANNEL, _START, _MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
    is_for_all_answers = True

    def _answer(self) -> Parsing[None]:
        self._buffer.keep(MAX_HELD)
        try:  # the prompt ends with the role, and a recipient may follow it
            marker = yield from next_word(self._buffer, _TO)
        except ParseError:
            self._break()
            marker = yield from self._content_until(*_ENDS)
        while marker:
            while marker in _HEADS:
                marker = yield from self._message(marker)
            self._buffer.drop_kept()
            marker = yield from self._content_until(*_ENDS)

    def _message(self, marker: str) -> Parsing[str]:
        """Read one message after its first mark or recipient. Return the mark that ended it, "" for none."""
        buffer = self._buffer
        try:
            header = marker + (yield from self._until(_MESSAGE))
        except ParseError:
            self._break()
            return ""
        buffer.drop_kept()
        channel = _NAME_OF_CHANNEL.match(header.rpartition(_CHANNEL)[2])
        recipient = _RECIPIENT.search(header)
        if recipient is not None and (recipient[1] or recipient[2] in self._names):
            if self._max_calls == 0:
                return (yield from pass_until(buffer, _ENDS, lambda _: None))
            buffer.keep(MAX_HELD)
            yield from self._attempt(self._calls(recipient[2]))
            return (yield from pass_until(buffer, _ENDS, self._after_call))
        is_reasoning = channel is not None and channel[1] == "analysis"
        return (yield from pass_until(buffer, _ENDS, self._reasoning if is_reasoning else self._content))

    def _calls(self, marker: str) -> Parsing[None]:
        """`marker`: the name of the function, which the header of the message has."""
        yield from self._object(marker)
        self._end()

    def _reasoning(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def _after_call(self, text: str) -> None:
        if text.strip():
            self._content(text)
