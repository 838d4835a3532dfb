"""Chat bodies to the variables of a chat template."""

import contextlib
from typing import Any

import msgspec

from protocol.media import MediaFile
from services.frontend.errors import invalid
from services.frontend.json_text import json_value
from services.frontend.openai.schemas.messages import ContentPart, FilePart, MessageParam, ToolCall
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.templates.jobs import Conversation

ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a text for Anthropic that Claude Code puts first. It differs from request to request, so that no cached
block would be found."""


def conversation(body: ChatRequest) -> Conversation:
    """Raises: APIError"""
    return Conversation(
        [_plain(message, index) for index, message in enumerate(body.messages)],
        [tool.plain() for tool in body.tools] if body.tools else None,
        body.add_generation_prompt is not False,
        bool(body.continue_final_message),
        _variables(body),
    )


def _variables(body: ChatRequest) -> dict[str, Any]:
    """Return `chat_template_kwargs` and what `reasoning_effort` sets, by vLLM's rule."""
    given, effort = body.chat_template_kwargs or {}, body.reasoning_effort
    if effort is None:
        return given
    return {"enable_thinking": effort != "none", **given, "reasoning_effort": effort}


def num_chars(body: ChatRequest) -> int:
    """Return the number of characters in the messages' texts, which decides the thread that renders them."""
    total = 0
    for message in body.messages:
        content = message.content or message.refusal or ""
        total += len(content) if isinstance(content, str) else sum(len(part.text) for part in content)
        total += sum(len(call.function.arguments) for call in message.tool_calls or ())
        total += len(message.reasoning or message.reasoning_content or "")
    return total


def _plain(message: MessageParam, index: int) -> dict[str, Any]:
    """Raises: APIError"""
    if message.role == "user" and (message.content is None or message.content == []):
        raise invalid(f"messages.{index}.content is missing; the message of a user needs one", "messages")
    plain = message.plain()
    if isinstance(message.content, list) and message.content:
        plain["content"] = [_part(part) for part in message.content]
    if message.role == "system":
        plain["content"] = _without_attribution(plain["content"])
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        plain["reasoning"] = plain["reasoning_content"] = reasoning
        if not (message.tool_calls and plain["content"]):  # the template of gpt-oss refuses both
            plain["thinking"] = reasoning
    return plain


def _without_attribution(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(ATTRIBUTION) else content
    first, *others = content
    text = first.get("text", "")
    if not text.startswith(ATTRIBUTION):
        return content
    rest = _without_attribution(text)
    return [{**first, "text": rest}, *others] if rest else others or ""


def _part(part: ContentPart) -> dict[str, Any]:
    """Return a part as chat templates expect it, by vLLM's rule."""
    return {"type": part.file.kind} if isinstance(part, FilePart) else {"type": "text", "text": part.text}


def media_files(body: ChatRequest) -> list[MediaFile]:
    return [file for message in body.messages for file in message.files]


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as an object, {} if they are none, by vLLM's rule: each later request has a call
    that was cut off."""
    arguments: dict[str, Any] = {}
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        arguments = json_value(call.function.arguments or "{}", dict[str, Any])
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
