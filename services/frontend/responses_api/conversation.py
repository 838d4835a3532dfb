"""Bodies of the Responses API to chat bodies, so that all dialects share the prompt, sampling and tools."""

from collections.abc import Sequence
from typing import Any, ClassVar

from services.frontend.errors import invalid
from services.frontend.openai.parameters.body import keep_allowed_tools, validated
from services.frontend.openai.schemas.messages import FunctionDefinition
from services.frontend.openai.schemas.requests import ChatRequest, JSONSchema, ResponseFormat
from services.frontend.responses_api import schemas

JSON = dict[str, Any]
_SAME = ("stop", "chat_template_kwargs", "parallel_tool_calls")
"""Fields that have the same name and meaning in a chat body, beside those of all dialects."""


def input_items(body: schemas.ResponsesRequest) -> list[schemas.Item]:
    """Return the input as items; a text is a message of the user."""
    if isinstance(body.input, str):
        return [schemas.InputMessage(role="user", content=body.input)]
    return body.input


def with_parts(item: JSON) -> JSON:
    """Return an item of the input as it is listed: the content of a message is a list."""
    if not isinstance(text := item.get("content"), str):
        return item
    if item["role"] == "assistant":
        return {**item, "content": [{"type": "output_text", "text": text, "annotations": []}]}
    return {**item, "content": [{"type": "input_text", "text": text}]}


def chat_request(body: schemas.ResponsesRequest, history: Sequence[schemas.Item]) -> ChatRequest:
    """Return the chat body with the same meaning.

    Args:
        history: items of the earlier turns, without their instructions.

    Raises: APIError
    """
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = system + messages_of([*history, *input_items(body)])
    fields: JSON = {name: getattr(body, name) for name in _SAME if name in body.model_fields_set}
    fields |= {**body.sampled_fields(), "messages": messages, "max_completion_tokens": body.max_output_tokens}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.tools:
        known = {*FunctionDefinition.model_fields}
        functions = (tool.model_dump(exclude_none=True, include=known) for tool in body.tools)
        fields["tools"] = [{"type": "function", "function": function} for function in functions]
    choice = body.tool_choice
    if isinstance(choice, schemas.ResponsesToolName):
        fields["tool_choice"] = _named(choice)
    elif isinstance(choice, schemas.ResponsesAllowedTools):
        allowed = {"mode": choice.mode, "tools": [*map(_named, choice.tools)]}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    elif choice != "auto" or body.tools:  # clients send "auto" without tools
        fields["tool_choice"] = choice
    chat = validated(fields, ChatRequest)
    keep_allowed_tools(chat)
    return chat


def _named(tool: schemas.ResponsesToolName) -> JSON:
    return {"type": "function", "function": {"name": tool.name}}


class _TextFormat(ResponseFormat):
    origin: ClassVar[str] = "text.format"


def _response_format(given: schemas.TextFormat) -> ResponseFormat:
    """Raises: APIError"""
    if given.type != "json_schema":
        return _TextFormat(type=given.type)
    if given.schema_ is None:
        raise invalid("text.format.schema is missing; it is the schema that the answer must match", "text")
    return _TextFormat(type="json_schema", json_schema=JSONSchema(schema=given.schema_))


def messages_of(items: Sequence[schemas.Item]) -> list[JSON]:
    """Return chat messages. Reasoning, text and calls of one answer are one message of the assistant."""
    messages: list[JSON] = []
    for item in items:
        match item:
            case schemas.InputMessage(role="assistant"):
                _join(messages, content=_parts(item.content))
            case schemas.InputMessage():
                messages.append({"role": item.role, "content": _parts(item.content)})
            case schemas.ReasoningItem():
                _join(messages, reasoning="".join(part.text for part in item.content or item.summary))
            case schemas.FunctionCallItem():
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                _join(messages, call=call)
            case schemas.FunctionCallOutput():
                message = {"role": "tool", "tool_call_id": item.call_id, "content": _parts(item.output)}
                messages.append(message)
    return messages


def _join(
    messages: list[JSON],
    content: str | list[JSON] | None = None,
    reasoning: str | None = None,
    call: JSON | None = None,
) -> None:
    """Add a part of an answer to the last message, or begin a new one where the last cannot take it."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or (call is None and (last["content"] or "tool_calls" in last)):
        messages.append(last := {"role": "assistant", "content": ""})
    if content is not None:
        last["content"] = content
    if reasoning is not None:
        last["reasoning_content"] = last.get("reasoning_content", "") + reasoning
    if call is not None:
        last.setdefault("tool_calls", []).append(call)


def _parts(content: str | list[schemas.Part]) -> str | list[JSON]:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, schemas.InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ] or ""
