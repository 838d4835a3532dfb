"""Request bodies. Every field has a bound. OpenAI's and vLLM's fields that are not served are in tables."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError

from protocol.requests import MAX_PRIORITY
from protocol.sampling import (
    MAX_BIAS,
    MAX_BIASED,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
)
from services.frontend.tools.names import MAX_NAME, NAME_PATTERN

MAX_TEMPERATURE = 2.0
"""OpenAI's bound."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 128
MAX_BAD_WORD_TEXTS = 128
MAX_TOOLS = 128
"""Tools of a body; OpenAI's bound. An assistant message has no more calls."""
MAX_PARTS = 1024
"""Parts of a message's content."""
MAX_PROMPTS = 64
MAX_TEXT = 4_000_000
"""Characters."""
MAX_PROMPT_IDS = 2_000_000
MAX_MESSAGES = 4096
MAX_CHOICES = 16
"""Maximum of `n`, the answers per prompt."""
MAX_SCHEMA_CHARS = 262_144
MAX_ALLOWED_IDS = 262_144
MAX_INPUTS = 2048
"""Inputs of one embedding request; OpenAI's bound."""

# `fail_fast`: a list is checked up to its first wrong item, as a million errors would block the event loop.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_IDS, fail_fast=True)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]
ToolName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]
"""Name of a tool that the body declares."""
GivenName = Annotated[str, Field(max_length=MAX_NAME)]
"""Name of a tool in a call, or in `tool_choice`."""
TemplateVariables = Annotated[dict[str, Any], Field(max_length=32)]
Bias = Annotated[float, Field(json_schema_extra={"minimum": -MAX_BIAS, "maximum": MAX_BIAS})]
"""`parameters.sampling` checks the range, so that the error names the token."""


def _bounded(given: object) -> object:
    """Count the items of a mapping before pydantic checks each of them."""
    if isinstance(given, dict) and len(given) > MAX_BIASED:
        context = {"field_type": "Dictionary", "max_length": MAX_BIASED, "actual_length": len(given)}
        raise PydanticKnownError("too_long", context)
    return given


JSON = dict[str, Any]
"""The size is bounded by the body's, the depth when a schema is compiled."""
Biases = Annotated[dict[str, Bias], Field(max_length=MAX_BIASED), BeforeValidator(_bounded)]

Neutral = Mapping[str, tuple[Any, ...]]
"""Known parameters that are not served, each with the values that change nothing; null is always one of them."""

NEUTRAL: Neutral = {
    "best_of": (1,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "web_search_options": (),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "truncation_side": ("left",),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors", "none"),
    "return_mm_kwargs": (False, True),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "repetition_detection": (),
    "stream_interval": (1,),
    "padding": ("do_not_pad",),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "use_activation": (True,),
    "task": ("embed",),
    "instruction": (),
    "max_tokens_per_query": (0,),
    "max_tokens_per_doc": (0,),
}
HINTS: Mapping[str, str] = {
    "best_of": "use n and choose among the answers",
    "guided_json": "use structured_outputs.json or response_format",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_whitespace_pattern": "use structured_outputs.whitespace_pattern",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "logits_processors": "requests cannot bring code; use logit_bias, bad_words or allowed_token_ids",
    "chat_template": "start with --chat-template",
}
"""Replacements for parameters that are not supported."""
NEUTRAL_IN_MESSAGE: Neutral = {
    "function_call": (),
    "audio": (),
    "annotations": ([],),
}
"""Fields of an answer that the official client sends back as part of the next conversation."""


def _add_unserved(schema: JSON, kind: type["OpenObject"]) -> None:
    """Describe the known fields that are not served, with the values that change nothing."""
    for name, values in kind.unserved().items():
        allowed = (None, *values)
        distinct = [v for i, v in enumerate(allowed) if v not in allowed[:i]]  # 1 and 1.0 are equal in JSON
        schema["properties"].setdefault(name, {"enum": distinct, "description": "Not supported."})


class OpenObject(BaseModel):
    """Object of a body with more fields than are served: the rule for them is in `parameters.extra_fields`."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_add_unserved)

    @classmethod
    def unserved(cls) -> Neutral:
        """Return the known fields that are not served."""
        return {}


class StreamOptions(OpenObject):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Put the usage into every event, not only into the last one."""
    include_obfuscation: bool = False
    """Not used; events have no padding."""


class JSONSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field("schema", max_length=256)
    description: Text | None = None
    schema_: JSON | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchema | None = None
    structures: Annotated[list[JSON], Field(max_length=256, fail_fast=True)] | None = None
    triggers: Annotated[list[Text], Field(max_length=256, fail_fast=True)] | None = None
    format: JSON | None = None


class StructuredOutputs(BaseModel):
    """vLLM's parameter. Exactly one of the first six fields is set."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_: Annotated[str, Field(max_length=MAX_SCHEMA_CHARS)] | JSON | None = Field(None, alias="json")
    regex: str | None = Field(None, max_length=MAX_SCHEMA_CHARS)
    choice: (
        Annotated[
            list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=1024, fail_fast=True)
        ]
        | None
    ) = None
    grammar: str | None = Field(None, max_length=MAX_SCHEMA_CHARS)
    json_object: bool | None = None
    structural_tag: str | None = Field(None, max_length=MAX_SCHEMA_CHARS)
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
    prompt_cache_options: JSON | None = None
    """Not used."""
    session_id: str | None = Field(None, max_length=512)
    """Not used. Routers in front of several servers read it."""
    metadata: JSON | None = None
    """Not used; answers are not stored."""
    store: bool | None = False
    """Not used; answers are not stored."""
    service_tier: str | None = Field(None, max_length=64)
    """Not used; `priority` orders requests."""

    @classmethod
    def unserved(cls) -> Neutral:
        return unserved_by(cls)


class ScheduledRequest(BaseRequest):
    """Fields of every body that the engine computes."""

    priority: int | None = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Lower values run earlier under the `priority` scheduling policy."""
    cache_salt: str | None = Field(None, max_length=256)


class SampledRequest(ScheduledRequest):
    """Fields of every body that generates text, with the same name and meaning in all dialects."""

    stream: bool | None = False
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = False
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)
    logit_bias: Biases | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORD_TEXTS, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True)] | None
    ) = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    structured_outputs: StructuredOutputs | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Not used."""
    prediction: JSON | None = None
    """Not used; `--speculative-config` makes drafts."""

    def sampled_fields(self) -> JSON:
        """Return the given fields of those that all dialects share."""
        given = SampledRequest.model_fields.keys() & self.model_fields_set
        return {name: getattr(self, name) for name in given}


class BaseGenerationRequest(SampledRequest):
    """Fields of both completions and chat."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    stop: Stop | Stops | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    prompt_logprobs: Logprobs | None = None
    """Refused with `stream`."""
    return_tokens_as_token_ids: bool | None = False
    """Write tokens in log-probabilities as token_id:123."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    """Number of tokens to keep at the end of the prompt; -1: as many as the context holds."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = False
    response_format: ResponseFormat | None = None
    """The answer matches it, unless the length limit cuts it off. A complete answer ends even before `min_tokens`."""

    def stops(self) -> list[str]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]


class CompletionRequest(BaseGenerationRequest):
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    """0 is only allowed with `echo`: the answer is the prompt and its log-probabilities."""
    logprobs: Logprobs | None = None
    echo: bool | None = False
    prompt: (
        Text | TokenIds | Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    )  # fmt: skip


class TextPart(OpenObject):
    type: Literal["text"]
    text: Text


class RefusalPart(OpenObject):
    """Refusal of another model. It is text for this one."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class FunctionCall(OpenObject):
    name: GivenName
    arguments: Text = ""
    """The text of a JSON object."""


class ToolCall(OpenObject):
    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, ge=0, lt=2**31)
    """Not used; present if the client joined the call from the deltas of a stream."""


class MessageParam(OpenObject):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    """Older name of `reasoning`."""
    refusal: Text | None = None
    """Refusal of another model: the text of a message without content."""

    @classmethod
    def unserved(cls) -> Neutral:
        return NEUTRAL_IN_MESSAGE

    def plain(self) -> dict[str, Any]:
        """Return role, text and name as chat templates expect them."""
        parts = self.content if isinstance(self.content, list) else []
        text = "".join(part.text for part in parts) if parts else self.content or self.refusal or ""
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class FunctionDefinition(OpenObject):
    name: ToolName
    description: Text | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class Tool(OpenObject):
    type: Literal["function"] = "function"
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return the given fields as chat templates expect them."""
        known = set(FunctionDefinition.model_fields)
        return {"type": self.type, "function": self.function.model_dump(include=known, exclude_unset=True)}


class FunctionName(OpenObject):
    name: GivenName


class NamedTool(OpenObject):
    type: Literal["function"] = "function"
    function: FunctionName


class ChatRequest(BaseGenerationRequest):
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = False
    top_logprobs: Logprobs | None = None
    echo: bool | None = False
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = True
    include_reasoning: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """Variable of the chat template. As in vLLM it also sets `enable_thinking`, unless `chat_template_kwargs` does."""
    chat_template_kwargs: TemplateVariables | None = None


class EmbeddingRequest(ScheduledRequest):
    input: (
        Text | TokenIds | Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS, fail_fast=True)]
    )  # fmt: skip
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(None, ge=1, lt=2**31)
    """Number of values to keep at the beginning of the embedding, which is normalised afterwards."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    """Number of tokens to keep at the end of each input; -1: as many as the context holds."""
    add_special_tokens: bool | None = True


@cache
def unserved_by(kind: type[BaseModel]) -> Neutral:
    """Return the known fields that a kind of body does not serve: also those that OpenAI's other bodies have."""
    served = kind.model_fields.keys()
    others = {
        name: () if info.is_required() else (info.get_default(),)
        for other in (CompletionRequest, ChatRequest, EmbeddingRequest)
        for name, info in other.model_fields.items()
    }
    return {name: values for name, values in {**others, **NEUTRAL}.items() if name not in served}
