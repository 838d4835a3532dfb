"""Parsing of the answers to one chat request: tools, reasoning, and the grammar that follows from both."""

from dataclasses import dataclass, replace

import msgspec

from protocol.sampling import StructuredOutputParams
from services.frontend.openai.parameters.structured import structured_params
from services.frontend.openai.parameters.tool_choice import ToolChoice
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.output_formats import OutputFormats
from services.frontend.parsing.events import Content, ParsedEvent
from services.frontend.reasoning.think import ReasoningStart, ThinkParser, start_in_message, start_in_prompt
from services.frontend.text.tokenizer import Tokenizer
from services.frontend.tools.parser import ToolParser

TAIL = 32
"""Tokens at the end of a prompt that are searched for reasoning tags."""


@dataclass(frozen=True)
class ChatOutput:
    body: ChatRequest
    formats: OutputFormats
    tools: ToolChoice
    start: ReasoningStart | None = None
    """Beginning of the answers; None: the model does not reason, or the prompt is not known yet."""

    @classmethod
    def from_body(cls, body: ChatRequest, formats: OutputFormats) -> "ChatOutput":
        """Clears `body.skip_special_tokens` if the markers to parse are special tokens. Raises: APIError"""
        tools = ToolChoice.from_body(body, formats.tools, formats.auto_tool_choice)
        is_parsed = tools.parser is not None and tools.parser is formats.tools
        if (is_parsed and formats.tools_are_special) or formats.reasoning_is_special:
            body.skip_special_tokens = False
        return cls(body, formats, tools)

    def after(self, prompt: list[int], tokenizer: Tokenizer) -> "ChatOutput":
        """Return the same for answers that follow these tokens."""
        formats = self.formats
        if formats.reasoning is None:
            return self
        if self.body.continue_final_message:
            start = start_in_message(self.body.messages[-1].plain()["content"], formats.tags)
        else:
            tail = tokenizer.decode(prompt[-TAIL:], show_special=True)
            start = start_in_prompt(tail, formats.reasoning, formats.tags)
        return replace(self, start=start)

    def grammar(self) -> StructuredOutputParams | None:
        """Return what constrains the output. A grammar begins after the reasoning, if there may be some.

        Raises: APIError
        """
        grammar = structured_params(self.body)  # also refuses what the body contradicts
        grammar = self.tools.grammar or grammar
        if grammar is None or self.start in (None, ReasoningStart.OUTSIDE):
            return grammar
        if self.start is ReasoningStart.BY_TAG and not self.formats.grammar_waits_for_tag:
            return grammar
        return msgspec.structs.replace(grammar, begins_after=self.formats.reasoning_end)


class AnswerParser:
    """Splits the text of one choice: first the reasoning is cut off, then tool calls are found in the rest."""

    def __init__(self, output: ChatOutput, eager: bool) -> None:
        """
        Args:
            eager: return a call before it is complete.
        """
        tools = output.tools
        self._thinking = ThinkParser(output.start, output.formats.tags) if output.start is not None else None
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
            return calls.push(text, is_last)
        events = self._thinking.push(text, is_last)
        if calls is None:
            return events
        found: list[ParsedEvent] = []
        for event in events:
            found += calls.push(event.text) if isinstance(event, Content) else [event]
        return found + (calls.push("", is_last) if is_last else [])
