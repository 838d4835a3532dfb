"""Chat answers whose text is split into reasoning, tool calls and content."""

from dataclasses import replace

from services.frontend.openai.answers.chunk import Chunk
from services.frontend.openai.answers.dialects import ChatDialect
from services.frontend.openai.parameters.tool_choice import Mode, ToolChoice
from services.frontend.openai.schemas.responses import CallDelta, ChatChoice, ChatDelta, MessageDelta
from services.frontend.parsing.events import Arguments, CallStart, Content, ParsedEvent, Reasoning
from services.frontend.reasoning.think import THINK, ReasoningStart, ReasoningTags, ThinkParser
from services.frontend.tools.parser import ToolParser

_EMPTY = Chunk()


class AnswerParser:
    """Splits the text of one choice: first the reasoning is cut off, then tool calls are found in the rest."""

    def __init__(
        self, start: ReasoningStart | None, tools: ToolChoice, eager: bool, tags: ReasoningTags = THINK
    ) -> None:
        """
        Args:
            start: None, if the model does not reason.
            eager: return a call before it is complete.
        """
        self._thinking = ThinkParser(start, tags) if start is not None else None
        self._calls: ToolParser | None = None
        if tools.parser is not None:
            self._calls = tools.parser(tools.names, eager, tools.max_calls, tools.parameters)

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls if self._calls is not None else 0

    def push(self, text: str, is_last: bool) -> list[ParsedEvent]:
        calls = self._calls
        if self._thinking is None:
            if calls is None:
                return [Content(text)] if text else []
            return calls.push(text) + (calls.finish() if is_last else [])
        events = self._thinking.push(text) + (self._thinking.finish() if is_last else [])
        if calls is None:
            return events
        found: list[ParsedEvent] = []
        for event in events:
            found += calls.push(event.text) if isinstance(event, Content) else [event]
        return found + (calls.finish() if is_last else [])


class ToolDialect(ChatDialect):
    has_constant_frame = False

    def __init__(
        self,
        tools: ToolChoice,
        start: ReasoningStart | None,
        show_reasoning: bool,
        role: str = "assistant",
        beginning: str = "",
        tags: ReasoningTags = THINK,
    ) -> None:
        """
        Args:
            start: None, if the model does not reason.
        """
        super().__init__(role, beginning)
        self._tools = tools
        self._start = start
        self._tags = tags
        self._show_reasoning = show_reasoning
        self._parsers: dict[int, AnswerParser] = {}
        """By choice, of a stream."""

    def choice(self, index: int, whole: Chunk) -> ChatChoice:
        parser = AnswerParser(self._start, self._tools, eager=False, tags=self._tags)
        delta = self._parsed(parser.push(whole.text, is_last=True))
        choice = super().choice(index, self._replaced(whole, parser, delta.get("content") or ""))
        message = choice["message"]
        if calls := delta.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": call["type"],
                    "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
                }
                for call in calls
            ]
        if self._show_reasoning and (self._start is not None or "reasoning" in delta):
            message["reasoning_content"] = message["reasoning"] = delta.get("reasoning")
        if not message["content"] and (calls or self._start is not None):
            message["content"] = None
        return choice

    def opening(self, index: int) -> ChatDelta:
        """Content is null, as the answer may have none."""
        delta: MessageDelta = {"role": self._role, "content": self._beginning or None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, index: int, chunk: Chunk) -> list[ChatDelta]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = AnswerParser(self._start, self._tools, eager=True, tags=self._tags)
        events = parser.push(chunk.text, is_last=chunk.finish is not None)
        if chunk.is_text_only and not events:
            return []
        delta = self._parsed(events)
        bare = _EMPTY if chunk.is_text_only else self._replaced(chunk, parser, "")
        if not delta and bare.is_text_only:
            return []
        return [self._delta(index, bare, delta)]

    def _replaced(self, chunk: Chunk, parser: AnswerParser, text: str) -> Chunk:
        """Return the chunk with its text replaced by `text`.

        `finish_reason` becomes "tool_calls" if the answer has calls, but not if the client named the one tool to call:
        OpenAI and vLLM report "stop" then.
        """
        is_call = chunk.finish == "stop" and parser.num_calls > 0 and self._tools.mode is not Mode.NAMED
        return replace(chunk, text=text, finish="tool_calls" if is_call else chunk.finish)

    def _parsed(self, events: list[ParsedEvent]) -> MessageDelta:
        """Return one delta for all events: texts of a kind are joined, and so are the parts of a call."""
        delta: MessageDelta = {}
        calls: dict[int, CallDelta] = {}
        for event in events:
            match event:
                case Content(text):
                    delta["content"] = (delta.get("content") or "") + text
                case Reasoning(text) if self._show_reasoning:
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
