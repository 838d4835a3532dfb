"""How the answers to one chat request are read: tools, reasoning, and the grammar that follows from both."""

from dataclasses import dataclass

import msgspec

from protocol.sampling import StructuredOutputParams
from services.frontend.openai.answers.dialects import ChatDialect
from services.frontend.openai.answers.tool_dialect import ToolDialect
from services.frontend.openai.parameters.tool_choice import Mode, ToolChoice
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.output_formats import AnswerForms
from services.frontend.reasoning.formats import begins, continues
from services.frontend.reasoning.think import Begins
from services.frontend.text.tokenizer import Tokenizer

TAIL = 32
"""Tokens at the end of a prompt that tell whether it opens or closes the reasoning."""


@dataclass(frozen=True)
class Reading:
    body: ChatRequest
    forms: AnswerForms
    tools: ToolChoice

    @classmethod
    def of(cls, body: ChatRequest, forms: AnswerForms) -> "Reading":
        """May ask for special tokens in the text, where they are what marks the parts. Raises: APIError"""
        tools = ToolChoice.of(body, forms.tools, forms.auto_tool_choice)
        if (tools.mode is Mode.AUTO and forms.tools_are_special) or forms.reasoning_is_special:
            body.skip_special_tokens = False
        return cls(body, forms, tools)

    def begins(self, prompt: list[int], tokenizer: Tokenizer) -> Begins | None:
        """Where the answers begin; None for a model that does not reason."""
        if self.forms.reasoning is None:
            return None
        if self.body.continue_final_message:
            return continues(self.body.messages[-1].plain()["content"])
        return begins(tokenizer.decode_all(prompt[-TAIL:]), self.forms.reasoning)

    def grammar(
        self, wanted: StructuredOutputParams | None, begins: Begins | None
    ) -> StructuredOutputParams | None:
        """`wanted` is what the body says of its content. Reasoning comes before any grammar."""
        grammar = self.tools.grammar or wanted
        if grammar is None or begins in (None, Begins.OUTSIDE):
            return grammar
        return msgspec.structs.replace(grammar, begins_after=self.forms.reasoning_end)

    def dialect(self, begins: Begins | None, role: str, beginning: str) -> ChatDialect:
        if self.tools.mode is Mode.NONE and begins is None:
            return ChatDialect(role, beginning)
        shown = self.body.include_reasoning is not False
        return ToolDialect(self.tools, begins, shown, role, beginning)
