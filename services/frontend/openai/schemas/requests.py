"""Request bodies. Every field has a bound."""

from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol.pooling import PoolingTask
from protocol.requests import MAX_PRIORITY
from protocol.sampling import MAX_REPETITION_PENALTY
from services.frontend.openai.schemas import fields
from services.frontend.openai.schemas.messages import AllowedTools, MessageParam, NamedTool, Tool
from services.frontend.openai.schemas.open_object import NEUTRAL, Neutral, OpenObject


class StreamOptions(OpenObject):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Put the usage into every event, not only into the last one."""
    include_obfuscation: bool = False
    """Not used; events have no padding."""


class JSONSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field("schema", max_length=256)
    description: fields.Text | None = None
    schema_: fields.JSON | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    origin: ClassVar[str] = "response_format"
    """Field of the client's body that it is made of."""
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchema | None = None
    structures: Annotated[list[fields.JSON], Field(max_length=256, fail_fast=True)] | None = None
    triggers: Annotated[list[fields.Text], Field(max_length=256, fail_fast=True)] | None = None
    format: fields.JSON | None = None


class StructuredOutputs(BaseModel):
    """vLLM's parameter. Exactly one of the first six fields is set."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_: Annotated[str, Field(max_length=fields.MAX_SCHEMA_CHARS)] | fields.JSON | None = Field(None, alias="json")
    regex: str | None = Field(None, max_length=fields.MAX_SCHEMA_CHARS)
    choice: (
        Annotated[list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=1024, fail_fast=True)]
        | None
    ) = None
    grammar: str | None = Field(None, max_length=fields.MAX_SCHEMA_CHARS)
    json_object: bool | None = None
    structural_tag: str | None = Field(None, max_length=fields.MAX_SCHEMA_CHARS)
    disable_any_whitespace: bool = False
    disable_additional_properties: Literal[False] | None = None
    """Not served: `additionalProperties` of a schema says it."""
    whitespace_pattern: str | None = Field(None, max_length=1024)


class BaseRequest(OpenObject):
    """Fields of every body. Most change no answer: they are accepted and not used."""

    model: str | None = Field(None, max_length=512)
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    """Part of the answer's id, except in `/v1/responses` and `/v1/messages`. The header `x-request-id` names the
    request in logs."""
    user: str | None = Field(None, max_length=512)
    """Not used; the client's name for its user. OpenAI has replaced it with `safety_identifier`."""
    safety_identifier: str | None = Field(None, max_length=512)
    """Not used."""
    prompt_cache_key: str | None = Field(None, max_length=512)
    """Not used. OpenAI routes by it to a server that may hold the prompt's beginning in its cache."""
    prompt_cache_retention: str | None = Field(None, max_length=64)
    """Not used. Blocks stay in the prefix cache until their memory is needed."""
    prompt_cache_options: fields.JSON | None = None
    """Not used."""
    session_id: str | None = Field(None, max_length=512)
    """Not used. Routers in front of several servers read it."""
    metadata: fields.JSON | None = None
    """Not used; answers are not stored."""
    store: bool | None = False
    """Not used; answers are not stored."""
    service_tier: str | None = Field(None, max_length=64)
    """Not used; `priority` orders requests."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Not used."""
    prediction: fields.JSON | None = None
    """Not used; `--speculative-config` makes drafts."""

    @classmethod
    def unserved(cls) -> Neutral:
        return unserved_by(cls)


class ScheduledRequest(BaseRequest):
    """Fields of every body that the engine computes."""

    priority: int | None = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Lower values run earlier under the `priority` scheduling policy; others than 0 are refused without it."""
    cache_salt: str | None = Field(None, max_length=256)


class SampledRequest(ScheduledRequest):
    """Fields of every body that generates text, with the same name and meaning in all dialects."""

    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=fields.MAX_TEMPERATURE, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: Annotated[list[fields.TokenId], Field(max_length=fields.MAX_STOP_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = False
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)
    logit_bias: fields.Biases | None = None
    bad_words: Annotated[list[fields.Stop], Field(max_length=fields.MAX_BAD_WORD_TEXTS, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[fields.TokenId], Field(min_length=1, max_length=fields.MAX_ALLOWED_IDS, fail_fast=True)] | None
    ) = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    structured_outputs: StructuredOutputs | None = None

    def sampled_fields(self) -> fields.JSON:
        """Return the given fields of those that all dialects share."""
        given = SampledRequest.model_fields.keys() & self.model_fields_set
        return {name: getattr(self, name) for name in given}


class BaseGenerationRequest(SampledRequest):
    """Fields of both completions and chat."""

    stream_options: StreamOptions | None = None
    stream_interval: int | None = Field(None, ge=1, lt=2**31)
    """Tokens of an answer that an event of a stream has, at least `--stream-interval`; the first one comes alone."""
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: fields.Stop | fields.Stops | None = None
    n: int | None = Field(1, ge=1, le=fields.MAX_CHOICES)
    prompt_logprobs: fields.Logprobs | None = None
    """Refused with `stream`."""
    return_tokens_as_token_ids: bool | None = False
    """Write tokens in log-probabilities as token_id:123."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    """Number of tokens to keep: the end of the prompt, behind the special tokens that the tokenizer adds to a text; -1:
    as many as the context holds."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    """The answer matches it, unless the length limit cuts it off. A complete answer ends even before `min_tokens`."""

    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]

    def interval(self, least: int) -> int:
        """Return the tokens of an answer that are written together. `least`: those of a stream, at least."""
        return max(least, self.stream_interval or 1) if self.stream else 1


class CompletionRequest(BaseGenerationRequest):
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    """0 is only allowed with `echo`: the answer is the prompt and its log-probabilities."""
    logprobs: fields.Logprobs | None = None
    echo: bool | None = False
    prompt: (
        fields.Text | fields.TokenIds
        | Annotated[list[fields.Text], Field(max_length=fields.MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[fields.TokenIds], Field(max_length=fields.MAX_PROMPTS, fail_fast=True)]
    )  # fmt: skip


class ChatRequest(BaseGenerationRequest):
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=fields.MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = False
    top_logprobs: fields.Logprobs | None = None
    echo: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    tools: Annotated[list[Tool], Field(max_length=fields.MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template. As in vLLM it also sets `enable_thinking`, unless `chat_template_kwargs` does."""
    chat_template_kwargs: fields.TemplateVariables | None = None


class VectorsRequest(ScheduledRequest):
    """Fields of every body whose inputs, texts or pairs of texts, become vectors."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    """Number of tokens to keep of each input; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that is cut off, by default left; with a model that generates no text right, and texts keep their
    special tokens."""
    use_activation: bool | None = None
    """False: leave out the last function, such as the norm of an embedding or the softmax of classes."""


class TextsRequest(VectorsRequest):
    input: (
        fields.Text | fields.TokenIds
        | Annotated[list[fields.Text], Field(max_length=fields.MAX_INPUTS, fail_fast=True)]
        | Annotated[list[fields.TokenIds], Field(max_length=fields.MAX_INPUTS, fail_fast=True)]
    )  # fmt: skip
    add_special_tokens: bool | None = True


class EmbeddingRequest(TextsRequest):
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    """Number of values to keep at the beginning of the embedding, which is normalised afterwards."""


class PoolingRequest(EmbeddingRequest):
    task: PoolingTask | None = None
    """The task that the model is served for; others are refused."""


@cache
def unserved_by(kind: type[OpenObject]) -> Neutral:
    """Return the known fields that a kind of body does not serve: also those that OpenAI's other bodies have."""
    served = kind.model_fields.keys()
    others = {
        name: () if info.is_required() else (info.get_default(),)
        for other in (CompletionRequest, ChatRequest, EmbeddingRequest)
        for name, info in other.model_fields.items()
    }
    known = {**others, **NEUTRAL, **kind.not_served}
    return {name: values for name, values in known.items() if name not in served}
