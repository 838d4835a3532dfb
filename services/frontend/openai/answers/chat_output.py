"""Parsing of the answers to one chat request: tools, reasoning, and the grammar that follows from both."""

from dataclasses import dataclass

import msgspec

from protocol.sampling import StructuredOutputParams
from services.frontend.openai.answers.dialects import ChatDialect
from services.frontend.openai.answers.tool_dialect import AnswerParser, ToolDialect
from services.frontend.openai.parameters.tool_choice import ToolChoice
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.output_formats import OutputFormats
from services.frontend.reasoning.think import ReasoningStart, start_in_message, start_in_prompt
from services.frontend.text.tokenizer import Tokenizer

TAIL = 32
"""Tokens at the end of a prompt that are searched for reasoning tags."""


@dataclass(frozen=True)
class ChatOutput:
    body: ChatRequest
    formats: OutputFormats
    tools: ToolChoice

    @classmethod
    def from_body(cls, body: ChatRequest, formats: OutputFormats) -> "ChatOutput":
        """Clears `body.skip_special_tokens` if the markers to parse are special tokens. Raises: APIError"""
        tools = ToolChoice.from_body(body, formats.tools, formats.auto_tool_choice)
        is_parsed = tools.parser is not None and tools.parser is formats.tools
        if (is_parsed and formats.tools_are_special) or formats.reasoning_is_special:
            body.skip_special_tokens = False
        return cls(body, formats, tools)

    def reasoning_start(self, prompt: list[int], tokenizer: Tokenizer) -> ReasoningStart | None:
        """Return where the answers begin; None, if the model does not reason."""
        if self.formats.reasoning is None:
            return None
        if self.body.continue_final_message:
            return start_in_message(self.body.messages[-1].plain()["content"], self.formats.tags)
        return start_in_prompt(tokenizer.decode_all(prompt[-TAIL:]), self.formats.reasoning, self.formats.tags)

    def grammar(
        self, content: StructuredOutputParams | None, start: ReasoningStart | None
    ) -> StructuredOutputParams | None:
        """Return what constrains the output. A grammar begins after the reasoning, if there may be some.

        Args:
            content: the body's constraint on the content.
        """
        grammar = self.tools.grammar or content
        if grammar is None or start in (None, ReasoningStart.OUTSIDE):
            return grammar
        if start is ReasoningStart.BY_TAG and not self.formats.grammar_waits_for_tag:
            return grammar
        return msgspec.structs.replace(grammar, begins_after=self.formats.reasoning_end)

    def dialect(self, start: ReasoningStart | None, role: str, beginning: str) -> ChatDialect:
        if self.tools.parser is None and start is None:
            return ChatDialect(role, beginning)
        shown = self.body.include_reasoning is not False
        return ToolDialect(self.tools, start, shown, role, beginning, self.formats.tags)

    def parser(self, start: ReasoningStart | None, eager: bool) -> AnswerParser:
        return AnswerParser(start, self.tools, eager, self.formats.tags)
