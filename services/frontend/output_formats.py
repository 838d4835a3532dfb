"""In which forms the served model writes calls and reasoning."""

import logging
from dataclasses import dataclass

from services.config import FrontendConfig
from services.frontend.reasoning import formats as reasoning_formats
from services.frontend.reasoning.think import CLOSING, OPENING, Begins
from services.frontend.text.tokenizer import Tokenizer
from services.frontend.tools import formats as tool_formats
from services.frontend.tools.parser import ToolParser

log = logging.getLogger("runahead.frontend")


@dataclass(frozen=True)
class AnswerForms:
    tools: type[ToolParser] | None = None
    auto_tool_choice: bool = False
    tools_are_special: bool = False
    """Whether special tokens, which are otherwise left out of the text, stand around calls."""
    reasoning: Begins | None = None
    """Where an answer begins when its prompt does not tell; None: the model does not reason."""
    reasoning_end: tuple[int, ...] = ()
    """Tokens of the closing tag."""
    reasoning_is_special: bool = False

    @classmethod
    def of(cls, config: FrontendConfig, tokenizer: Tokenizer) -> "AnswerForms":
        reasoning_end = tuple(tokenizer.encode_rendered(CLOSING)) if config.reasoning_parser else ()
        if len(reasoning_end) > 1:
            log.warning(
                "%s is %d tokens here: structured output begins after reasoning only if the model writes just these",
                CLOSING,
                len(reasoning_end),
            )
        tools = tool_formats.FORMATS[config.tool_call_parser] if config.tool_call_parser else None
        reasoning = reasoning_formats.FORMATS[config.reasoning_parser] if config.reasoning_parser else None
        return cls(
            tools,
            config.enable_auto_tool_choice,
            tools is not None and any(_is_hidden(mark, tokenizer) for mark in tools.marks),
            reasoning,
            reasoning_end,
            reasoning is not None and any(_is_hidden(tag, tokenizer) for tag in (OPENING, CLOSING)),
        )


def _is_hidden(mark: str, tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode_rendered(mark)
    return tokenizer.decode(ids) != tokenizer.decode_all(ids)
