"""Response bodies of the Messages API: types of what is sent and of what /openapi.json describes."""

from typing import Any, Literal

from typing_extensions import TypedDict

from services.frontend.openai.schemas.responses import Natural

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicUsage(TypedDict):
    input_tokens: Natural
    """Tokens of the prompt that the prefix cache did not hold."""
    output_tokens: Natural
    cache_creation_input_tokens: Natural
    cache_read_input_tokens: Natural


class MessageHead(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str


class MessageEnding(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageResponse(MessageHead, MessageEnding):
    content: list[dict[str, Any]]
    """Blocks of the types text, thinking and tool_use."""
    usage: AnthropicUsage


class MessageEvent(TypedDict):
    type: Literal[
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip


class CountTokensResponse(TypedDict):
    input_tokens: Natural
