"""Request bodies of OpenAI's Responses API. Every field has a bound; unserved fields are refused by name."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field
from pydantic import Tag as _Tag

from protocol.sampling import MAX_REPETITION_PENALTY
from services.frontend.openai.schemas.requests import (
    JSON,
    MAX_MESSAGES,
    MAX_STOPS,
    NEUTRAL,
    BaseRequest,
    Neutral,
    OpenObject,
    Stop,
    Text,
)

MAX_PARTS = 1024


class InputText(OpenObject):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = Field(None, max_length=MAX_PARTS)
    """Not used; answers have none."""
    logprobs: list[Any] | None = Field(None, max_length=1_000_000)
    """Not used."""


class RefusalPart(OpenObject):
    type: Literal["refusal"]
    refusal: Text


Part = Annotated[InputText | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]
Status = Literal["in_progress", "completed", "incomplete"]


class _InputItem(OpenObject):
    id: str | None = Field(None, max_length=256)
    """Not used."""
    status: Status | None = None
    """Not used."""


class InputMessage(_InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | Parts
    phase: str | None = Field(None, max_length=64)
    """Not used."""


class FunctionCallItem(_InputItem):
    type: Literal["function_call"]
    call_id: str = Field(max_length=256)
    name: str = Field(max_length=128)
    arguments: Text


class FunctionCallOutput(_InputItem):
    type: Literal["function_call_output"]
    call_id: str = Field(max_length=256)
    output: Text | Parts


class ReasoningText(OpenObject):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


Reasonings = Annotated[list[ReasoningText], Field(max_length=MAX_PARTS, fail_fast=True)]


class ReasoningItem(_InputItem):
    type: Literal["reasoning"]
    summary: Reasonings = Field([])
    content: Reasonings | None = None
    encrypted_content: Text | None = None
    """Not used; answers never have one."""


def _type_of(item: object) -> str:
    """Return the type of an input item; a message needs none."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else kind if isinstance(kind, str) else ""


ITEMS = (InputMessage, FunctionCallItem, FunctionCallOutput, ReasoningItem)
PARTS = (InputText, RefusalPart, ReasoningText)
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


class ResponsesTool(OpenObject):
    type: Literal["function"]
    """Tools that the server itself would run are not served."""
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: Text | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class ResponsesToolName(OpenObject):
    type: Literal["function"]
    name: str = Field(max_length=128)


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    description: Text | None = None
    schema_: JSON | None = Field(None, alias="schema")
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


_UNSERVED: Neutral = {
    **{name: NEUTRAL[name] for name in ("kv_transfer_params", "vllm_xargs", "mm_processor_kwargs")},
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "access_programs": ({},),
    "image": ({},),
    "moderation": (),
    "previous_input_messages": ([],),
    "enable_response_messages": (False,),
}


class ResponsesRequest(BaseRequest):
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    store: bool | None = True
    """Keep the answer for `previous_response_id` and GET, if the server has a store."""
    stream: bool | None = False
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolName | None = None
    parallel_tool_calls: bool | None = True
    include: Annotated[list[Include], Field(max_length=16, fail_fast=True)] | None = None
    """Not used."""
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """vLLM's addition, as are all fields below."""
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = False
    priority: int | None = Field(0, ge=-(2**20), le=2**20)
    cache_salt: str | None = Field(None, max_length=256)
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None

    @classmethod
    def unserved(cls) -> Neutral:
        return _UNSERVED
