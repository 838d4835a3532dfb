"""Bodies of Anthropic's Messages API. Every field of a request has a bound; unserved ones are refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from services.frontend.openai.schemas import fields
from services.frontend.openai.schemas.open_object import HINTS, Neutral, OpenObject
from services.frontend.openai.schemas.requests import BaseRequest, SampledRequest, unserved_by
from services.frontend.openai.schemas.responses import Natural


class TextBlock(OpenObject):
    """More fields, such as `cache_control` and `citations`, are ignored with a notice."""

    type: Literal["text"]
    text: fields.Text


class Base64Source(OpenObject):
    type: Literal["base64"]
    media_type: str = Field(max_length=256)
    data: Annotated[str, Field(max_length=fields.MAX_URL)]

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class URLSource(OpenObject):
    type: Literal["url"]
    url: Annotated[str, Field(max_length=fields.MAX_URL)]


class ImageBlock(OpenObject):
    type: Literal["image"]
    source: Annotated[Base64Source | URLSource, Field(discriminator="type")]


class ToolUseBlock(OpenObject):
    type: Literal["tool_use"]
    id: str = Field(max_length=256)
    name: fields.GivenName
    input: fields.JSON


ResultBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(OpenObject):
    type: Literal["tool_result"]
    tool_use_id: str = Field(max_length=256)
    content: fields.Text | Annotated[list[ResultBlock], Field(max_length=fields.MAX_PARTS, fail_fast=True)] | None = (
        None
    )
    is_error: bool | None = None
    """Not used; the content describes the error."""


class ThinkingBlock(OpenObject):
    type: Literal["thinking"]
    thinking: fields.Text
    signature: fields.Text = ""
    """Not used; answers have an empty one."""


class RedactedThinkingBlock(OpenObject):
    """Not used; answers never have one."""

    type: Literal["redacted_thinking"]
    data: fields.Text = ""


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class AnthropicMessage(OpenObject):
    role: Literal["user", "assistant", "system"]
    content: fields.Text | Annotated[list[Block], Field(max_length=fields.MAX_PARTS, fail_fast=True)]


class AnthropicTool(OpenObject):
    type: Literal["custom"] | None = None
    name: fields.ToolName
    description: fields.Text | None = None
    input_schema: fields.JSON


class AnthropicToolChoice(OpenObject):
    type: Literal["auto", "any", "tool", "none"]
    name: fields.GivenName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(OpenObject):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1024, lt=2**31)
    """Not used: reasoning and answer share `max_tokens`."""
    display: str | None = Field(None, max_length=64)
    """Not used."""


class AnthropicFormat(BaseModel):
    """Form of the answer's text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["json_schema"]
    schema_: fields.JSON = Field(alias="schema")


class OutputConfig(OpenObject):
    format: AnthropicFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template, as `reasoning_effort` of a chat."""


_KEEP_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Value that Claude Code sends with `thinking`."""


class CountTokensRequest(BaseRequest):
    """A conversation. Only its prompt is computed."""

    not_served: ClassVar[Neutral] = {
        "container": (),
        "mcp_servers": ([],),
        "thread": (),
        "compaction": (),
        "context_management": ({"edits": []}, _KEEP_ALL),
    }
    hints: ClassVar[Mapping[str, str]] = {
        **HINTS,
        "stop": "use stop_sequences",
        "response_format": "use output_config.format",
        "reasoning_effort": "use output_config.effort",
    }
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
    system: fields.Text | Annotated[list[TextBlock], Field(max_length=fields.MAX_PARTS, fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    """Sets `enable_thinking` for the chat template."""
    output_config: OutputConfig | None = None
    output_format: AnthropicFormat | None = None
    """Older name of `output_config.format`."""
    chat_template_kwargs: fields.TemplateVariables | None = None
    """vLLM's addition."""

    @classmethod
    def unserved(cls) -> Neutral:
        """Return those of a message: the count of the body of a message is not refused for its other fields."""
        return unserved_by(MessagesRequest)


class MessagesRequest(CountTokensRequest, SampledRequest):
    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: fields.Stops | None = None


# Answers: types of what is sent and of what /openapi.json describes.

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
