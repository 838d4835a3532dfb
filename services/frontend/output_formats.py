"""The formats in which the served model writes tool calls and reasoning: configured, or recognised by texts of the chat
template."""

import logging
from dataclasses import dataclass
from typing import NamedTuple

from services.checkpoint import CheckpointError
from services.config import FrontendConfig
from services.config.frontend import ReasoningFormat, ToolCallFormat
from services.frontend.reasoning.think import THINK, ReasoningStart, ReasoningTags
from services.frontend.text.tokenizer import Tokenizer
from services.frontend.tools.harmony import HarmonyParser
from services.frontend.tools.json_calls import (
    DeepSeekV3Parser,
    GraniteParser,
    HermesParser,
    Llama3JSONParser,
    MistralParser,
    Phi4MiniParser,
)
from services.frontend.tools.parser import ToolParser
from services.frontend.tools.tagged_calls import Glm45Parser, Llama4PythonicParser, Qwen3XMLParser

log = logging.getLogger("runahead.frontend")


class _ToolFormat(NamedTuple):
    name: ToolCallFormat
    """vLLM's."""
    parser: type[ToolParser]
    marks: tuple[str, ...]
    """Texts that the template contains, all of them; backslashes are ignored."""
    architecture: str = ""
    """Beginning of the architecture's name, where models of others share the marks."""


_TOOLS: tuple[_ToolFormat, ...] = (
    _ToolFormat("openai", HarmonyParser, ("<|channel|>", "to=functions.")),
    _ToolFormat("deepseek_v3", DeepSeekV3Parser, ("<｜tool▁calls▁begin｜>", "```json")),
    _ToolFormat("mistral", MistralParser, ("[TOOL_CALLS]",)),
    _ToolFormat("glm45", Glm45Parser, ("<tool_call>", "<arg_key>")),
    _ToolFormat("qwen3_xml", Qwen3XMLParser, ("<tool_call>", "<function=", "<parameter=")),
    _ToolFormat("granite", GraniteParser, ("<|tool_call|>",), "Granite"),
    _ToolFormat("phi4_mini_json", Phi4MiniParser, ("functools[",)),
    _ToolFormat("llama4_pythonic", Llama4PythonicParser, ("<|header_start|>", "[func_name1(")),
    _ToolFormat("llama3_json", Llama3JSONParser, ("<|start_header_id|>", '{"name": ', '"parameters": ')),
    _ToolFormat("hermes", HermesParser, ("<tool_call>", '{"name": ', '"arguments": ')),
)
"""The first one that matches counts."""
TOOL_FORMATS: dict[str, type[ToolParser]] = dict(sorted((format.name, format.parser) for format in _TOOLS))
"""`--tool-call-parser`."""


class _ReasoningFormat(NamedTuple):
    name: ReasoningFormat
    """vLLM's."""
    tags: ReasoningTags
    start: ReasoningStart
    """Start of an answer whose prompt does not determine it."""
    marks: tuple[str, ...] = ()
    """As in `_ToolFormat`; none: the format is not recognised."""


_GRANITE = ReasoningTags(
    ("Here's my thought process:", "Here is my thought process:"),
    ("Here's my response:", "Here is my response:"),
    " \n",
)
_BRACKETS = ReasoningTags(("[THINK]",), ("[/THINK]",))
_REASONING: tuple[_ReasoningFormat, ...] = (
    _ReasoningFormat("mistral", _BRACKETS, ReasoningStart.BY_TAG, ("[THINK]",)),
    _ReasoningFormat("qwen3", THINK, ReasoningStart.BY_TAG, ("<think>",)),
    _ReasoningFormat("granite", _GRANITE, ReasoningStart.BY_TAG, ("Here is my thought process:",)),
    _ReasoningFormat("glm45", THINK, ReasoningStart.BY_TAG),
    _ReasoningFormat("deepseek_r1", THINK, ReasoningStart.INSIDE),
)
REASONING_FORMATS: dict[str, _ReasoningFormat] = {format.name: format for format in _REASONING}
"""`--reasoning-parser`."""


def recognised_tools(template: str, architecture: str) -> ToolCallFormat | None:
    """Return the format in which the template shows calls, None if it shows no format of `ToolCallFormat`."""
    plain = template.replace("\\", "")
    if "tools" not in plain:
        return None
    for name, _, marks, beginning in _TOOLS:
        if architecture.startswith(beginning) and all(mark in plain for mark in marks):
            return name
    return None


def recognised_reasoning(template: str) -> ReasoningFormat | None:
    found = (format.name for format in _REASONING if format.marks and all(mark in template for mark in format.marks))
    return next(found, None)


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
                    f"--tool-call-parser ({', '.join(TOOL_FORMATS)})"
                )
        if reasoning_format == "auto":
            reasoning_format = recognised_reasoning(template) or "none"
        if reasoning_format == "openai_gptoss":  # its parser of calls reads the reasoning, too
            if tool_format not in ("none", "openai"):
                raise CheckpointError(f"--reasoning-parser openai_gptoss reads no calls in the format {tool_format}")
            tool_format = "openai"
        log.info(
            "tool calls: %s, reasoning: %s (--tool-call-parser %s, --reasoning-parser %s)",
            tool_format, reasoning_format, config.tool_call_parser, config.reasoning_parser,
        )  # fmt: skip
        reasoning = REASONING_FORMATS.get(reasoning_format)
        tags = reasoning.tags if reasoning is not None else THINK
        reasoning_end = () if reasoning is None else tuple(tokenizer.encode(tags.closing[-1], add_special_tokens=False))
        if len(reasoning_end) > 1:
            log.warning(
                "%s is %d tokens: structured output begins after reasoning only if the model writes exactly these",
                tags.closing[-1],
                len(reasoning_end),
            )
        tools = TOOL_FORMATS.get(tool_format)
        return cls(
            tools,
            tools is not None and config.tool_call_parser != "none" and config.enable_auto_tool_choice is not False,
            tools is not None and any(_is_hidden(marker, tokenizer) for marker in tools.markers),
            reasoning.start if reasoning is not None else None,
            reasoning_end,
            reasoning is not None and any(_is_hidden(tag, tokenizer) for tag in (*tags.opening, *tags.closing)),
            tags,
            config.reasoning_parser != "auto",
        )


def _is_hidden(marker: str, tokenizer: Tokenizer) -> bool:
    """Return whether the text lacks `marker` by default, because a special token stands for it."""
    ids = tokenizer.encode(marker, add_special_tokens=False)
    return tokenizer.decode(ids) != tokenizer.decode(ids, show_special=True)
