"""Request bodies of Anthropic's Messages API. Every field has a bound; unserved fields are refused by name."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.frontend.openai.schemas.requests import (
    JSON,
    MAX_MESSAGES,
    MAX_STOPS,
    NEUTRAL,
    Neutral,
    Stop,
    Text,
)


class _Part(BaseModel):
    """More fields, such as `cache_control` and `citations`, are ignored with a notice."""

    model_config = ConfigDict(extra="allow", strict=True)


class TextBlock(_Part):
    type: Literal["text"]
    text: Text


class ToolUseBlock(_Part):
    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: str = Field(max_length=128)
    input: JSON


class ToolResultBlock(_Part):
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: Text | Annotated[list[TextBlock], Field(max_length=1024, fail_fast=True)] | None = None
    is_error: bool | None = None
    """Not used; the content describes the error."""


class ThinkingBlock(_Part):
    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""
    """Not used; answers have an empty one."""


class RedactedThinkingBlock(_Part):
    """Not used; answers never have one."""

    type: Literal["redacted_thinking"]
    data: Text = ""


BLOCKS = (TextBlock, ToolUseBlock, ToolResultBlock, ThinkingBlock, RedactedThinkingBlock)
Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(_Part):
    role: Literal["user", "assistant"]
    content: Text | Annotated[list[Block], Field(max_length=1024, fail_fast=True)]


class AnthropicTool(_Part):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: Text | None = None
    input_schema: JSON


class AnthropicToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=128)
    disable_parallel_tool_use: bool | None = None


class Thinking(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1024, lt=2**31)
    """Not used: reasoning and answer share `max_tokens`."""
    display: str | None = Field(None, max_length=64)
    """Not used."""


class CountTokensRequest(BaseModel):
    """A conversation. Only its prompt is computed."""

    model_config = ConfigDict(extra="allow", strict=True)
    unserved: ClassVar[Neutral] = {
        **{
            name: NEUTRAL[name]
            for name in ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "watermarking")
        },
        "container": (),
        "mcp_servers": ([],),
        "context_management": (),
        "output_config": ({},),
        "output_format": (),
    }
    """Known fields that are not served, with the values that change nothing."""

    model: str | None = Field(None, max_length=512)
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | Annotated[list[TextBlock], Field(max_length=1024, fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    """Sets `enable_thinking` for the chat template."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    """vLLM's addition."""


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    metadata: JSON | None = None
    """Not used."""
    service_tier: str | None = Field(None, max_length=64)
    """Not used."""
    cache_salt: str | None = Field(None, max_length=256)
    """vLLM's addition."""
