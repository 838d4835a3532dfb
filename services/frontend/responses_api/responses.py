"""Response bodies of the Responses API: types of what is sent and of what /openapi.json describes."""

from typing import Any, Literal

from typing_extensions import TypedDict

from services.frontend.openai.schemas.responses import Natural


class InputTokensDetails(TypedDict):
    cached_tokens: Natural
    cache_write_tokens: Natural


class OutputTokensDetails(TypedDict):
    reasoning_tokens: Natural


class ResponsesUsage(TypedDict):
    input_tokens: Natural
    input_tokens_details: InputTokensDetails
    output_tokens: Natural
    output_tokens_details: OutputTokensDetails
    total_tokens: Natural


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ReasoningSetting(TypedDict):
    effort: str | None
    summary: None


class ResponseHead(TypedDict):
    """Fields of a response that its request decides."""

    id: str
    object: Literal["response"]
    created_at: Natural
    model: str
    background: bool
    instructions: str | None
    max_output_tokens: Natural | None
    max_tool_calls: None
    metadata: Any
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSetting
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: Any
    """The form of the text, as in the request."""
    tool_choice: str | dict[str, Any]
    tools: Any
    """Tools as in the request."""
    top_logprobs: Natural
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


class ResponseFailure(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseObject(ResponseHead):
    status: ResponseStatus
    completed_at: Natural | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[dict[str, Any]]
    """Items of the types message, reasoning and function_call."""
    usage: ResponsesUsage | None


class ResponseStreamEvent(TypedDict):
    type: str
    sequence_number: Natural


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: Natural
