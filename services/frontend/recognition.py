"""Formats of tool calls and of reasoning, recognised by texts of the chat template. No I/O."""

from typing import NamedTuple

from services.config.frontend import ReasoningFormat, ToolCallFormat


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
