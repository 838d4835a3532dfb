"""Bodies of the Messages API to chat bodies, so that both dialects share the prompt, sampling and tools."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, ClassVar

from services.frontend.anthropic import schemas
from services.frontend.errors import invalid
from services.frontend.json_text import json_text
from services.frontend.openai.parameters.body import validated
from services.frontend.openai.prompts.conversation import ATTRIBUTION
from services.frontend.openai.schemas.requests import ChatRequest, JSONSchema, ResponseFormat

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(body: schemas.CountTokensRequest) -> ChatRequest:
    """Return the chat body with the same meaning.

    A last message of the assistant is continued, and successive messages of a role are one, as in Anthropic's API.

    Raises: APIError
    """
    turns = groupby(body.messages, lambda message: message.role)
    messages = [plain for role, turn in turns for plain in _TURNS[role]([b for said in turn for b in _blocks(said)])]
    system = body.system or ""
    if not isinstance(system, str):
        system = [block for block in system if not block.text.startswith(ATTRIBUTION)]
    if system:
        text = system if isinstance(system, str) else "".join(block.text for block in system)
        messages.insert(0, {"role": "system", "content": text})
    thinks = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    variables = {**thinks, **(body.chat_template_kwargs or {})}
    fields: dict[str, Any] = {"messages": messages, "chat_template_kwargs": variables, **_output(body)}
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # the answer begins with nothing
    elif messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if body.tools:
        fields["tools"] = [
            {
                "function": {
                    "name": tool.name,
                    "parameters": tool.input_schema,
                    **({} if tool.description is None else {"description": tool.description}),
                }
            }
            for tool in body.tools
        ]
        fields |= _tool_choice(body.tool_choice)
    elif body.tool_choice is not None and body.tool_choice.type not in ("auto", "none"):
        raise invalid("tool_choice needs tools", "tool_choice")
    if isinstance(body, schemas.MessagesRequest):
        fields |= {**body.sampled_fields(), "max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    return validated(fields, ChatRequest)


class _OutputFormat(ResponseFormat):
    origin: ClassVar[str] = "output_config.format"


def _output(body: schemas.CountTokensRequest) -> dict[str, Any]:
    """Raises: APIError"""
    config = body.output_config or schemas.OutputConfig()
    if config.format is not None and body.output_format is not None:
        raise invalid("output_format is an older name of output_config.format; leave it out", "output_format")
    format = config.format or body.output_format
    fields: dict[str, Any] = {}
    if config.effort is not None:
        fields["reasoning_effort"] = config.effort
    if format is not None:
        fields["response_format"] = _OutputFormat(type="json_schema", json_schema=JSONSchema(schema=format.schema_))
    return fields


def _tool_choice(given: schemas.AnthropicToolChoice | None) -> dict[str, Any]:
    """Raises: APIError"""
    if given is None:
        return {}
    parallel = {"parallel_tool_calls": not given.disable_parallel_tool_use}
    if given.type != "tool":
        return {"tool_choice": _CHOICES[given.type], **parallel}
    if given.name is None:
        raise invalid("tool_choice of type tool needs a name", "tool_choice")
    return {"tool_choice": {"type": "function", "function": {"name": given.name}}, **parallel}


def _content(blocks: Sequence[schemas.TextBlock | schemas.ImageBlock]) -> str | list[dict[str, Any]]:
    """Return the text of one block, or the parts of a chat's message."""
    if len(blocks) == 1 and isinstance(block := blocks[0], schemas.TextBlock):
        return block.text
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, schemas.TextBlock)
        else {"type": "image_url", "image_url": {"url": block.source.url}}
        for block in blocks
    ]


def _blocks(message: schemas.AnthropicMessage) -> list[schemas.Block]:
    content = message.content
    return [schemas.TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _of_system(given: list[schemas.Block]) -> list[dict[str, Any]]:
    """Raises: APIError"""
    blocks = [block for block in given if isinstance(block, schemas.TextBlock)]
    if len(blocks) < len(given):
        raise invalid("messages: a message of the system has only text", "messages")
    return [{"role": "system", "content": "".join(block.text for block in blocks)}]


def _of_assistant(blocks: list[schemas.Block]) -> list[dict[str, Any]]:
    texts: list[schemas.TextBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case schemas.TextBlock():
                texts.append(block)
            case schemas.ThinkingBlock():
                thoughts.append(block.thinking)
            case schemas.ToolUseBlock():
                arguments = json_text(block.input)
                calls.append({"id": block.id, "function": {"name": block.name, "arguments": arguments}})
            case schemas.ToolResultBlock() | schemas.ImageBlock():
                raise invalid(f"messages: a block of type {block.type} belongs to a message of the user", "messages")
    plain: dict[str, Any] = {"role": "assistant", "content": _content(texts) if texts else ""}
    if calls:
        plain["tool_calls"] = calls
    if thoughts:
        plain["reasoning_content"] = "".join(thoughts)
    return [plain]


def _of_user(blocks: list[schemas.Block]) -> list[dict[str, Any]]:
    """Images in the result of a tool follow it in the message of the user."""
    plain: list[dict[str, Any]] = []
    parts: list[schemas.TextBlock | schemas.ImageBlock] = []
    for block in blocks:
        match block:
            case schemas.TextBlock() | schemas.ImageBlock():
                parts.append(block)
            case schemas.ToolResultBlock():
                given = [] if block.content is None or isinstance(block.content, str) else block.content
                texts = [part for part in given if isinstance(part, schemas.TextBlock)]
                parts += [part for part in given if isinstance(part, schemas.ImageBlock)]
                content = block.content if isinstance(block.content, str) else _content(texts) if texts else ""
                plain.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            case schemas.ToolUseBlock() | schemas.ThinkingBlock() | schemas.RedactedThinkingBlock():
                raise invalid(f"messages: a {block.type} belongs to a message of the assistant", "messages")
    if parts or not plain:
        plain.append({"role": "user", "content": _content(parts) if parts else None})
    return plain


_TURNS = {"system": _of_system, "assistant": _of_assistant, "user": _of_user}
"""Chat messages of one turn, by its role: results of tools become separate messages. Raises: APIError"""
