"""Response bodies of the Responses API as described in /openapi.json. Responses may have more fields."""

from typing import Any, Literal

from pydantic import BaseModel

from services.frontend.openai.schemas.responses import Natural


class InputTokensDetails(BaseModel):
    cached_tokens: Natural
    cache_write_tokens: Natural


class OutputTokensDetails(BaseModel):
    reasoning_tokens: Natural


class ResponsesUsage(BaseModel):
    input_tokens: Natural
    input_tokens_details: InputTokensDetails
    output_tokens: Natural
    output_tokens_details: OutputTokensDetails
    total_tokens: Natural


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: Natural
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    """Items of the types message, reasoning and function_call."""
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    previous_response_id: str | None
    usage: ResponsesUsage | None


class ResponseStreamEvent(BaseModel):
    type: str
    sequence_number: Natural


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItemList(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
