"""Response bodies as described in /openapi.json. Responses may have more fields."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

Natural = Annotated[int, Field(ge=0)]


class Error(BaseModel):
    message: str
    """The problem, and what would work."""
    type: str
    param: str | None
    """The field of the body that is wrong."""
    code: str | None


class ErrorResponse(BaseModel):
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
"""An entry for each token of the prompt, by token id; null for the first."""


class _BaseChoice(BaseModel):
    index: Natural
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    """null until the choice ends."""
    stop_reason: int | str | None = None
    """The stop string, or the token of `stop_token_ids`, that ended the choice."""
    token_ids: list[Natural] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Natural]


class CompletionChoice(_BaseChoice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[Natural] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _BaseResponse(BaseModel):
    id: str
    created: Natural
    """Seconds since 1970."""
    model: str


class CompletionResponse(_BaseResponse):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_BaseResponse):
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
    """Older name of `reasoning`."""
    tool_calls: list[CalledTool] | None = None


class ChatChoice(_BaseChoice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatResponse(_BaseResponse):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[Natural] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(_BaseChoice):
    delta: dict[str, Any]
    """New parts of the fields of `ChatMessage`."""
    logprobs: ChatLogprobs | None = None


class ChatChunk(_BaseResponse):
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


class EmbeddingResponse(_BaseResponse):
    object: Literal["list"]
    data: list[EmbeddingEntry]
    usage: EmbeddingUsage


class PoolingEntry(BaseModel):
    object: Literal["pooling"]
    index: Natural
    data: list[float] | str
    """Numbers, or little-endian float32 in base64."""


class PoolingResponse(_BaseResponse):
    object: Literal["list"]
    data: list[PoolingEntry]
    usage: EmbeddingUsage


class ScoreEntry(BaseModel):
    index: Natural
    object: Literal["score"]
    score: Annotated[float, Field(ge=-1, le=1)]
    """Cosine of the two embeddings."""


class ScoreResponse(_BaseResponse):
    object: Literal["list"]
    data: list[ScoreEntry]
    usage: EmbeddingUsage


class RerankResult(BaseModel):
    index: Natural
    """Position of the document in the request."""
    relevance_score: Annotated[float, Field(ge=-1, le=1)]
    document: dict[str, str] | None = None


class RerankResponse(BaseModel):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]
    """The most similar document comes first."""


class ModelEntry(BaseModel):
    id: str
    object: Literal["model"]
    created: Natural
    owned_by: str
    max_model_len: Natural | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelEntry]


class TokenizeResponse(BaseModel):
    count: Natural
    max_model_len: Natural | None
    tokens: list[Natural]
    token_strs: list[str] | None


class DetokenizeResponse(BaseModel):
    prompt: str


class VersionResponse(BaseModel):
    version: str


class LivenessResponse(BaseModel):
    status: Literal["alive"]


class ReadinessResponse(BaseModel):
    phase: str
    detail: str
    """One line for people."""
    progress: Annotated[float, Field(ge=0, le=1)]


class ServerInfo(BaseModel):
    version: str
    phase: str
    detail: str
    """One line for people."""
    served_model_names: list[str]
    max_model_len: Natural | None
    num_blocks: Natural
    """KV-cache blocks."""
    block_size: Natural
    """Tokens per block."""
    max_num_seqs: Natural
    features: dict[str, str]
    """Combination of features of the engine."""


class ModelInfo(BaseModel):
    model_path: str
    """Name of the model in the API."""
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True]
    max_model_len: Natural | None


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    special_tokens: dict[str, str]
    chat_template: str | None


class LoadResponse(BaseModel):
    server_load: Natural


class ResetResponse(BaseModel):
    success: bool
    """False: running requests still share blocks."""
