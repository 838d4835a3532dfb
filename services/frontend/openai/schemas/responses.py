"""Response bodies: types of the dictionaries that are sent, and of what /openapi.json describes.

Dictionaries cost a stream nothing; mypy checks each where it is made.
"""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Natural = Annotated[int, Field(ge=0)]


class PromptTokensDetails(TypedDict):
    cached_tokens: Natural


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: Natural
    """Length of the reasoning's text; with `n`, of all choices."""


class Usage(TypedDict):
    prompt_tokens: Natural
    completion_tokens: Natural
    total_tokens: Natural
    prompt_tokens_details: NotRequired[PromptTokensDetails | None]
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """Only in the usage of a whole answer with reasoning."""


class PromptToken(TypedDict):
    logprob: float
    rank: Annotated[int, Field(ge=1)]
    """1 is the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""An entry for each token of the prompt, by token id; null for the first."""


FinishName = Literal["stop", "length", "tool_calls"]


class _BaseChoice(TypedDict):
    index: Natural
    finish_reason: FinishName | None
    """null until the choice ends."""
    stop_reason: NotRequired[int | str | None]
    """The stop string, or the token of `stop_token_ids`, that ended the choice."""
    token_ids: NotRequired[list[Natural] | None]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[Natural]


class CompletionChoice(_BaseChoice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[Natural] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class AnswerHead(TypedDict):
    """Fields of every response body and every event."""

    id: str
    created: Natural
    """Seconds since 1970."""
    model: str


class CompletionResponse(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(AnswerHead):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]] | None


class PositionLogprobs(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[PositionLogprobs] | None
    refusal: None


class CalledFunction(TypedDict):
    name: str
    arguments: str
    """JSON."""


class CalledTool(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: str
    content: str | None
    refusal: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    """Older name of `reasoning`."""
    tool_calls: NotRequired[list[CalledTool] | None]


class ChatChoice(_BaseChoice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatResponse(AnswerHead):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[Natural] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str
    """The next part of the text."""


class CallDelta(TypedDict):
    """The next part of a call; the first one has all fields."""

    index: Natural
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class MessageDelta(TypedDict, total=False):
    """New parts of the fields of `ChatMessage`."""

    role: str
    content: str | None
    reasoning: str
    reasoning_content: str
    tool_calls: list[CallDelta]


class ChatDelta(_BaseChoice):
    delta: MessageDelta
    logprobs: NotRequired[ChatLogprobs | None]


class ChatChunk(AnswerHead):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[Natural]]


class EmbeddingEntry(TypedDict):
    object: Literal["embedding"]
    index: Natural
    embedding: list[float] | str
    """Numbers, or little-endian float32 in base64."""


class EmbeddingUsage(TypedDict):
    prompt_tokens: Natural
    total_tokens: Natural


class _ListResponse(AnswerHead):
    object: Literal["list"]
    usage: EmbeddingUsage


class EmbeddingResponse(_ListResponse):
    data: list[EmbeddingEntry]


class PoolingEntry(TypedDict):
    object: Literal["pooling"]
    index: Natural
    data: list[float] | list[list[float]] | str
    """Numbers, a list of them for each token, or little-endian float32 in base64."""


class PoolingResponse(_ListResponse):
    data: list[PoolingEntry]


class ClassificationEntry(TypedDict):
    index: Natural
    label: str | None
    """Name of the likeliest class."""
    probs: list[float]
    num_classes: Natural


class ClassificationResponse(_ListResponse):
    data: list[ClassificationEntry]


class ScoreEntry(TypedDict):
    index: Natural
    object: Literal["score"]
    score: float
    """Cosine of the two embeddings, or the number of a model that scores pairs."""


class ScoreResponse(_ListResponse):
    data: list[ScoreEntry]


class RerankResult(TypedDict):
    index: Natural
    """Position of the document in the request."""
    relevance_score: float
    document: NotRequired[dict[str, str] | None]


class RerankResponse(TypedDict):
    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]
    """The most similar document comes first."""
