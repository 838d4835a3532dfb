"""Chat answers in which reasoning and tool calls are told apart from content."""

from dataclasses import replace
from typing import Any

from services.frontend.openai.answers.chunk import Piece
from services.frontend.openai.answers.dialects import ChatDialect
from services.frontend.openai.parameters.tool_choice import Mode, ToolChoice
from services.frontend.parsing.events import Arguments, CallStart, Content, Event, Reasoning
from services.frontend.reasoning.think import Begins, ThinkParser
from services.frontend.tools.parser import ToolParser

_NOTHING = Piece()


class AnswerParser:
    """Of one choice: first the reasoning is cut off, what is left may hold calls."""

    def __init__(self, begins: Begins | None, tools: ToolChoice, eager: bool) -> None:
        """`begins`: None, for a model that does not reason."""
        self._thinking = ThinkParser(begins) if begins is not None else None
        self._calls: ToolParser | None = None
        if tools.parser is not None:
            self._calls = tools.parser(tools.names, eager, tools.most)

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls if self._calls is not None else 0

    def push(self, text: str, is_last: bool) -> list[Event]:
        calls = self._calls
        if self._thinking is None:
            if calls is None:
                return [Content(text)] if text else []
            return calls.push(text) + (calls.finish() if is_last else [])
        events = self._thinking.push(text) + (self._thinking.finish() if is_last else [])
        if calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += calls.push(event.text) if isinstance(event, Content) else [event]
        return found + (calls.finish() if is_last else [])


class ToolDialect(ChatDialect):
    text_is_plain = False

    def __init__(
        self,
        tools: ToolChoice,
        begins: Begins | None,
        show_reasoning: bool,
        role: str = "assistant",
        beginning: str = "",
    ) -> None:
        super().__init__(role, beginning)
        self._tools = tools
        self._begins = begins
        self._show_reasoning = show_reasoning
        self._parsers: dict[int, AnswerParser] = {}

    def choice(self, index: int, whole: Piece) -> dict[str, Any]:
        parser = AnswerParser(self._begins, self._tools, eager=False)
        said = self._said(parser.push(whole.text, is_last=True))
        choice = super().choice(index, self._ended(whole, parser, said.get("content", "")))
        message = choice["message"]
        if calls := said.get("tool_calls"):
            message["tool_calls"] = [
                {name: call[name] for name in ("id", "type", "function")} for call in calls
            ]
        if self._begins is not None and self._show_reasoning:
            message["reasoning_content"] = message["reasoning"] = said.get("reasoning")
        if not message["content"] and (calls or self._begins is not None):
            message["content"] = None
        return choice

    def opening(self, index: int) -> dict[str, Any]:
        """It is not known yet whether there will be content."""
        delta = {"role": self._role, "content": self._beginning or None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = AnswerParser(self._begins, self._tools, eager=True)
        events = parser.push(piece.text, is_last=piece.finish is not None)
        if piece.is_plain and not events:
            return []
        delta = self._said(events)
        bare = _NOTHING if piece.is_plain else self._ended(piece, parser, "")
        if not delta and bare.is_plain:
            return []
        return [{**chunk, "delta": delta} for chunk in super().deltas(index, bare)]

    def _ended(self, piece: Piece, parser: AnswerParser, text: str) -> Piece:
        """With what is shown instead of its text; an answer that stops after calls stops for them, unless the one call
        was named by the client: that is a plain stop, as with OpenAI and vLLM."""
        is_call = piece.finish == "stop" and parser.num_calls > 0 and self._tools.mode is not Mode.NAMED
        return replace(piece, text=text, finish="tool_calls" if is_call else piece.finish)

    def _said(self, events: list[Event]) -> dict[str, Any]:
        """In the shape of a delta: each kind of text is joined, and so is what belongs to one call."""
        said: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case Content(text):
                    said["content"] = said.get("content", "") + text
                case Reasoning(text) if self._show_reasoning:
                    said["reasoning_content"] = said["reasoning"] = said.get("reasoning", "") + text
                case CallStart(index, id, name):
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": id, "type": "function", "function": function}
                case Arguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        return said | ({"tool_calls": list(calls.values())} if calls else {})
