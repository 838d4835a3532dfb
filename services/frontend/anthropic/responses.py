"""Response bodies of the Messages API as described in /openapi.json. Responses may have more fields."""

from typing import Any, Literal

from pydantic import BaseModel

from services.frontend.openai.schemas.responses import Natural

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicError(BaseModel):
    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    type: Literal["error"]
    error: AnthropicError
    request_id: str


class AnthropicUsage(BaseModel):
    input_tokens: Natural
    """Tokens of the prompt that the prefix cache did not hold."""
    output_tokens: Natural
    cache_creation_input_tokens: Natural
    cache_read_input_tokens: Natural


class MessageResponse(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of the types text, thinking and tool_use."""
    stop_reason: StopReason
    stop_sequence: str | None
    usage: AnthropicUsage


class MessageEvent(BaseModel):
    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip


class CountTokensResponse(BaseModel):
    input_tokens: Natural
