"""The formats in which the served model writes tool calls and reasoning."""

import logging
from dataclasses import dataclass

from services.config import FrontendConfig
from services.frontend.reasoning import formats as reasoning_formats
from services.frontend.reasoning.think import THINK, ReasoningStart, ReasoningTags
from services.frontend.text.tokenizer import Tokenizer
from services.frontend.tools import formats as tool_formats
from services.frontend.tools.parser import ToolParser

log = logging.getLogger("runahead.frontend")


@dataclass(frozen=True)
class OutputFormats:
    tools: type[ToolParser] | None = None
    auto_tool_choice: bool = False
    tools_are_special: bool = False
    """True if the markers around calls are special tokens, which the text lacks by default."""
    reasoning: ReasoningStart | None = None
    """Start of an answer whose prompt does not determine it; None: the model does not reason."""
    reasoning_end: tuple[int, ...] = ()
    """Token ids of the closing tag."""
    reasoning_is_special: bool = False
    """True if the tags around reasoning are special tokens."""
    tags: ReasoningTags = THINK
    """Texts around reasoning."""

    @classmethod
    def from_config(cls, config: FrontendConfig, tokenizer: Tokenizer) -> "OutputFormats":
        reasoning = reasoning_formats.FORMATS[config.reasoning_parser] if config.reasoning_parser else None
        tags = reasoning.tags if reasoning is not None else THINK
        reasoning_end = tuple(tokenizer.encode_rendered(tags.closing[-1])) if reasoning is not None else ()
        if len(reasoning_end) > 1:
            log.warning(
                "%s is %d tokens: structured output begins after reasoning only if the model writes exactly these",
                tags.closing[-1],
                len(reasoning_end),
            )
        tools = tool_formats.FORMATS[config.tool_call_parser] if config.tool_call_parser else None
        return cls(
            tools,
            config.enable_auto_tool_choice,
            tools is not None and any(_is_hidden(marker, tokenizer) for marker in tools.markers),
            reasoning.start if reasoning is not None else None,
            reasoning_end,
            reasoning is not None
            and any(_is_hidden(tag, tokenizer) for tag in (*tags.opening, *tags.closing)),
            tags,
        )


def _is_hidden(marker: str, tokenizer: Tokenizer) -> bool:
    """Return whether the text lacks `marker` by default, because a special token stands for it."""
    ids = tokenizer.encode_rendered(marker)
    return tokenizer.decode(ids) != tokenizer.decode_all(ids)
