"""The bodies that clients get, as the API's document tells of them. Answers may hold more than what stands here."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

Natural = Annotated[int, Field(ge=0)]


class Error(BaseModel):
    message: str
    """What happened and what would work."""
    type: str
    param: str | None
    """The field of the body that is to blame."""
    code: str | None


class ErrorAnswer(BaseModel):
    error: Error


class PromptTokensDetails(BaseModel):
    cached_tokens: Natural


class Usage(BaseModel):
    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural
    prompt_tokens_details: PromptTokensDetails | None = None


class PromptToken(BaseModel):
    logprob: float
    rank: Annotated[int, Field(ge=1)]
    """1 is the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""Of each token of the prompt, by token id; null for the first."""


class _Choice(BaseModel):
    index: Natural
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    """null while the choice goes on."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended it."""
    token_ids: list[Natural] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Natural]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[Natural] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _Answer(BaseModel):
    id: str
    created: Natural
    """Seconds since 1970."""
    model: str


class CompletionAnswer(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None


class PositionLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[PositionLogprobs] | None


class CalledFunction(BaseModel):
    name: str
    arguments: str
    """JSON."""


class CalledTool(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: str
    content: str | None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same under its older name."""
    tool_calls: list[CalledTool] | None = None


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[Natural] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(_Choice):
    delta: dict[str, Any]
    """What is new in the message: the fields of `ChatMessage`, in parts."""
    logprobs: ChatLogprobs | None = None


class ChatChunk(_Answer):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    usage: Usage | None = None


class EmbeddingEntry(BaseModel):
    object: Literal["embedding"]
    index: Natural
    embedding: list[float] | str
    """Numbers, or little-endian float32 in base64."""


class EmbeddingUsage(BaseModel):
    prompt_tokens: Natural
    total_tokens: Natural


class EmbeddingAnswer(_Answer):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    usage: EmbeddingUsage


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"]
    created: Natural
    owned_by: str
    max_model_len: Natural | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelEntry]


class TokenizeAnswer(BaseModel):
    count: Natural
    max_model_len: Natural | None
    tokens: list[Natural]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


class Alive(BaseModel):
    status: Literal["alive"]


class Readiness(BaseModel):
    phase: str
    detail: str
    """One line for people."""
    progress: Annotated[float, Field(ge=0, le=1)]
