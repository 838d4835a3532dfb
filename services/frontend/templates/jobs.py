"""Messages between a frontend and the process that renders its chat templates.

They are JSON, as clients' values may have integers of any size, which MessagePack has none for.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class TemplateSources(msgspec.Struct, array_like=True):
    """The first message: templates to compile."""

    default: str | None
    tool_use: str | None
    """Used in place of `default` if tools are given."""
    special: dict[str, str]
    """Special tokens, which are variables of the templates."""


class Conversation(msgspec.Struct, array_like=True, frozen=True):
    """Variables of a template."""

    messages: list[dict[str, Any]]
    """The arguments of tool calls are objects."""
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The prompt ends inside the last message, so that the model continues it."""
    variables: Mapping[str, Any] = {}
    """`chat_template_kwargs`: values for other variables; those that the template does not have are ignored."""
    seconds: float = 1.0
    """Limit of processor time to render it."""


class Rendered(msgspec.Struct, array_like=True, tag=True):
    text: str


class TemplateRefused(msgspec.Struct, array_like=True, tag=True):
    """The template called `raise_exception`."""

    reason: str


class LimitReached(msgspec.Struct, array_like=True, tag=True):
    reason: str


class TemplatesBroken(msgspec.Struct, array_like=True, tag=True):
    """The templates cannot be compiled, or an expression failed."""

    reason: str


Outcome = Rendered | TemplateRefused | LimitReached | TemplatesBroken
