"""Request bodies of OpenAI's Responses API. Every field has a bound; unserved fields are refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field
from pydantic import Tag as _Tag

from services.frontend.openai.schemas import fields
from services.frontend.openai.schemas.messages import FunctionDefinition, FunctionName, RefusalPart
from services.frontend.openai.schemas.open_object import HINTS, Neutral, OpenObject
from services.frontend.openai.schemas.requests import SampledRequest


class InputText(OpenObject):
    type: Literal["input_text", "output_text", "text"]
    text: fields.Text
    annotations: list[Any] | None = Field(None, max_length=fields.MAX_PARTS)
    """Not used; answers have none."""
    logprobs: list[Any] | None = Field(None, max_length=1_000_000)
    """Not used."""


class InputImage(OpenObject):
    not_served: ClassVar[Neutral] = {"detail": ("auto",)}
    type: Literal["input_image"]
    file_id: None = None
    """Not supported. It comes first, so that its error does."""
    image_url: Annotated[str, Field(max_length=fields.MAX_URL)]


Part = Annotated[InputText | InputImage | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=fields.MAX_PARTS, fail_fast=True)]
Status = Literal["in_progress", "completed", "incomplete"]


class _InputItem(OpenObject):
    id: str | None = Field(None, max_length=256)
    """Not used."""
    status: Status | None = None
    """Not used."""


class InputMessage(_InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: fields.Text | Parts
    phase: str | None = Field(None, max_length=64)
    """Not used."""


class FunctionCallItem(_InputItem):
    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: fields.GivenName
    arguments: fields.Text


class FunctionCallOutput(_InputItem):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: fields.Text | Parts


class ReasoningText(OpenObject):
    type: Literal["reasoning_text", "summary_text"]
    text: fields.Text


Reasonings = Annotated[list[ReasoningText], Field(max_length=fields.MAX_PARTS, fail_fast=True)]


class ReasoningItem(_InputItem):
    type: Literal["reasoning"]
    summary: Reasonings = Field([])
    content: Reasonings | None = None
    encrypted_content: fields.Text | None = None
    """Not used; answers never have one."""


def _type_of(item: object) -> str:
    """Return the type of an input item; a message needs none."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind if isinstance(kind, str) else ""


ITEMS = (InputMessage, FunctionCallItem, FunctionCallOutput, ReasoningItem)
Item = Annotated[
    Annotated[InputMessage, _Tag("message")]
    | Annotated[FunctionCallItem, _Tag("function_call")]
    | Annotated[FunctionCallOutput, _Tag("function_call_output")]
    | Annotated[ReasoningItem, _Tag("reasoning")],
    Discriminator(
        _type_of,
        custom_error_type="item_type",
        custom_error_message="only items of the types message, function_call, function_call_output and reasoning "
        "are served",
    ),
]


class ResponsesTool(FunctionDefinition):
    type: Literal["function"]
    """Tools that the server itself would run are not served."""


class ResponsesToolName(FunctionName):
    type: Literal["function"]


class ResponsesAllowedTools(OpenObject):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesToolName], Field(min_length=1, max_length=fields.MAX_TOOLS, fail_fast=True)]


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    description: fields.Text | None = None
    schema_: fields.JSON | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(OpenObject):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Not used."""


class ReasoningOptions(OpenObject):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Not used: the reasoning itself is in the answer."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """Older name of `summary`."""


class ResponsesStreamOptions(OpenObject):
    include_obfuscation: bool | None = False
    """Not used; events have no padding."""


Include = Literal[
    "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]  # fmt: skip
"""Parts of answers that this server never has, so that they change nothing."""


class ResponsesRequest(SampledRequest):
    not_served: ClassVar[Neutral] = {
        "conversation": (),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "context_management": ([],),
        "access_programs": ({},),
        "image": ({},),
        "previous_input_messages": ([],),
        "enable_response_messages": (False,),
    }
    hints: ClassVar[Mapping[str, str]] = {
        **HINTS,
        **dict.fromkeys(
            ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"), "use max_output_tokens"
        ),
        "response_format": "use text.format",
        "reasoning_effort": "use reasoning.effort",
        "messages": "use input",
    }
    input: fields.Text | Annotated[list[Item], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
    instructions: fields.Text | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = True
    """Keep the answer for `previous_response_id` and GET, if the server has a store."""
    background: bool | None = False
    """Generate the answer apart from the connection. Needs a store."""
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolName | ResponsesAllowedTools | None = None
    parallel_tool_calls: bool | None = True
    include: Annotated[list[Include], Field(max_length=16, fail_fast=True)] | None = None
    """Not used."""
    stop: fields.Stop | fields.Stops | None = None
    """vLLM's addition."""
    chat_template_kwargs: fields.TemplateVariables | None = None
    """vLLM's addition."""
