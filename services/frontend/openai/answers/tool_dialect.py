"""Chat answers whose text is split into reasoning, tool calls and content."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from services.frontend.openai.answers.chat_output import AnswerParser, ChatOutput
from services.frontend.openai.answers.chunk import Chunk
from services.frontend.openai.answers.dialects import ChatDialect
from services.frontend.openai.answers.usage import ReasoningCounter
from services.frontend.openai.schemas.responses import CallDelta, ChatChoice, ChatDelta, MessageDelta, Usage
from services.frontend.parsing.events import Arguments, CallStart, Content, ParsedEvent, Reasoning
from services.frontend.tools.forced import NamedParser

_EMPTY = Chunk()


def chat_dialect(output: ChatOutput, count_tokens: Callable[[str], int], role: str, beginning: str) -> ChatDialect:
    """Return the form of the answers to a chat. `role`, `beginning`: see `ChatDialect`."""
    if output.tools.parser is None and output.start is None:
        return ChatDialect(role, beginning)
    return ToolDialect(role, beginning, output=output, reasoning=ReasoningCounter(count_tokens))


@dataclass(kw_only=True)
class ToolDialect(ChatDialect):
    has_constant_frame = False
    no_content = None  # the answer may have none

    output: ChatOutput
    reasoning: ReasoningCounter
    _parsers: dict[int, AnswerParser] = field(default_factory=dict)
    """By choice, of a stream."""

    @property
    def _shows_reasoning(self) -> bool:
        return self.output.body.include_reasoning is not False

    def choice(self, index: int, whole: Chunk) -> ChatChoice:
        parser = AnswerParser(self.output, eager=False)
        delta = self._parsed(index, parser.push(whole.text, is_last=True))
        choice = super().choice(index, self._replaced(whole, parser, delta.get("content") or ""))
        message = choice["message"]
        if calls := delta.get("tool_calls"):
            found: list[Any] = [{"id": c["id"], "type": c["type"], "function": c["function"]} for c in calls]
            message["tool_calls"] = found
        if self._shows_reasoning and (self.output.start is not None or "reasoning" in delta):
            message["reasoning_content"] = message["reasoning"] = delta.get("reasoning")
        if not message["content"] and (calls or self.output.start is not None):
            message["content"] = None
        return choice

    def deltas(self, index: int, chunk: Chunk) -> list[ChatDelta]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = AnswerParser(self.output, eager=True)
        events = parser.push(chunk.text, is_last=chunk.finish is not None)
        if chunk.is_text_only and not events:
            return []
        delta = self._parsed(index, events)
        bare = _EMPTY if chunk.is_text_only else self._replaced(chunk, parser, "")
        if not delta and bare.is_text_only:
            return []
        return [self._delta(index, bare, delta)]

    def counted(self, usage: Usage) -> Usage:
        num_reasoning = self.reasoning.total()
        if self.output.start is not None or num_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        return usage

    def _replaced(self, chunk: Chunk, parser: AnswerParser, text: str) -> Chunk:
        """Return the chunk with its text replaced by `text`.

        `finish_reason` becomes "tool_calls" if the answer has calls, but not if the client named the one tool to call:
        OpenAI and vLLM report "stop" then.
        """
        is_call = chunk.finish == "stop" and parser.num_calls > 0 and self.output.tools.parser is not NamedParser
        return replace(chunk, text=text, finish="tool_calls" if is_call else chunk.finish)

    def _parsed(self, choice: int, events: list[ParsedEvent]) -> MessageDelta:
        """Return one delta for all events: texts of a kind are joined, and so are the parts of a call."""
        delta: MessageDelta = {}
        calls: dict[int, CallDelta] = {}
        for event in events:
            match event:
                case Content(text):
                    delta["content"] = (delta.get("content") or "") + text
                case Reasoning(text):
                    self.reasoning.add(text, choice)
                    if self._shows_reasoning:
                        delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
                case CallStart(index, id, name):
                    calls[index] = {
                        "index": index,
                        "id": id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                case Arguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta
