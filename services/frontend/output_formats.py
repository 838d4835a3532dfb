"""The formats in which the served model writes tool calls and reasoning: configured, or recognised by texts of the chat
template."""

import logging
from dataclasses import dataclass
from typing import NamedTuple

from services.checkpoint import CheckpointError
from services.config import FrontendConfig
from services.config.frontend import ReasoningFormat, ToolCallFormat
from services.frontend.reasoning import formats as reasoning_formats
from services.frontend.reasoning.think import THINK, ReasoningStart, ReasoningTags
from services.frontend.text.tokenizer import Tokenizer
from services.frontend.tools import formats as tool_formats
from services.frontend.tools.parser import ToolParser

log = logging.getLogger("runahead.frontend")


class _ToolSignature(NamedTuple):
    format: ToolCallFormat
    marks: tuple[str, ...]
    """Texts that the template contains, all of them; backslashes are ignored."""
    architecture: str = ""
    """Beginning of the architecture's name, where models of others share the marks."""


_TOOLS: tuple[_ToolSignature, ...] = (
    _ToolSignature("openai", ("<|channel|>", "to=functions.")),
    _ToolSignature("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    _ToolSignature("mistral", ("[TOOL_CALLS]",)),
    _ToolSignature("glm45", ("<tool_call>", "<arg_key>")),
    _ToolSignature("qwen3_xml", ("<tool_call>", "<function=", "<parameter=")),
    _ToolSignature("granite", ("<|tool_call|>",), "Granite"),
    _ToolSignature("phi4_mini_json", ("functools[",)),
    _ToolSignature("llama4_pythonic", ("<|header_start|>", "[func_name1(")),
    _ToolSignature("llama3_json", ("<|start_header_id|>", '{"name": ', '"parameters": ')),
    _ToolSignature("hermes", ("<tool_call>", '{"name": ', '"arguments": ')),
)
"""The first one that matches counts."""
_REASONING: tuple[tuple[ReasoningFormat, tuple[str, ...]], ...] = (
    ("mistral", ("[THINK]",)),
    ("qwen3", ("<think>",)),
    ("granite", ("Here is my thought process:",)),
)


def recognised_tools(template: str, architecture: str) -> ToolCallFormat | None:
    """Return the format in which the template shows calls, None if it shows no format of `ToolCallFormat`."""
    plain = template.replace("\\", "")
    if "tools" not in plain:
        return None
    for name, marks, beginning in _TOOLS:
        if architecture.startswith(beginning) and all(mark in plain for mark in marks):
            return name
    return None


def recognised_reasoning(template: str) -> ReasoningFormat | None:
    return next((name for name, marks in _REASONING if all(mark in template for mark in marks)), None)


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
    grammar_waits_for_tag: bool = True
    """True if a grammar leaves room for reasoning that the prompt has not begun. Only a format that was named allows
    it, because a model that does not reason then is not constrained."""

    @classmethod
    def from_config(
        cls, config: FrontendConfig, tokenizer: Tokenizer, template: str = "", architecture: str = ""
    ) -> "OutputFormats":
        """
        Args:
            template: text of the chat template that shows tools. `auto` looks for the formats in it.
            architecture: its name in the checkpoint.

        Raises: CheckpointError, if tools were asked for and the template does not show the format of calls.
        """
        tool_format, reasoning_format = config.tool_call_parser, config.reasoning_parser
        if tool_format == "auto":
            tool_format = recognised_tools(template, architecture) or "none"
            if tool_format == "none" and config.enable_auto_tool_choice:
                raise CheckpointError(
                    "--enable-auto-tool-choice: the chat template does not show the format of tool calls; name it with "
                    f"--tool-call-parser ({', '.join(tool_formats.FORMATS)})"
                )
        if reasoning_format == "auto":
            reasoning_format = recognised_reasoning(template) or "none"
        log.info(
            "tool calls: %s, reasoning: %s (--tool-call-parser %s, --reasoning-parser %s)",
            tool_format, reasoning_format, config.tool_call_parser, config.reasoning_parser,
        )  # fmt: skip
        reasoning = reasoning_formats.FORMATS.get(reasoning_format)
        tags = reasoning.tags if reasoning is not None else THINK
        reasoning_end = tuple(tokenizer.encode_rendered(tags.closing[-1])) if reasoning is not None else ()
        if len(reasoning_end) > 1:
            log.warning(
                "%s is %d tokens: structured output begins after reasoning only if the model writes exactly these",
                tags.closing[-1],
                len(reasoning_end),
            )
        tools = tool_formats.FORMATS.get(tool_format)
        return cls(
            tools,
            tools is not None and config.enable_auto_tool_choice is not False,
            tools is not None and any(_is_hidden(marker, tokenizer) for marker in tools.markers),
            reasoning.start if reasoning is not None else None,
            reasoning_end,
            reasoning is not None and any(_is_hidden(tag, tokenizer) for tag in (*tags.opening, *tags.closing)),
            tags,
            config.reasoning_parser != "auto",
        )


def _is_hidden(marker: str, tokenizer: Tokenizer) -> bool:
    """Return whether the text lacks `marker` by default, because a special token stands for it."""
    ids = tokenizer.encode_rendered(marker)
    return tokenizer.decode(ids) != tokenizer.decode_all(ids)
