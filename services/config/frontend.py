"""Settings of a frontend."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from protocol.sampling import SamplingParams
from services.config.base import CHECKPOINT, ENABLE_LORA, MAX_LORA_RANK, REVISION, TOKENIZER, Texts, as_list, from_json
from services.config.http import HttpConfig
from services.config.sizes import Size

ToolCallFormat = Literal[
    "deepseek_v3",
    "glm45",
    "granite",
    "hermes",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "openai",
    "phi4_mini_json",
    "qwen3_xml",
]
DEFAULT_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Sampling parameters that may have a default of the checkpoint or the server."""
MAX_NEW_TOKENS = "max_new_tokens"
"""As vLLM has it: a checkpoint's is the default of `max_tokens` for chat; the server's limits all answers."""
ReasoningFormat = Literal["deepseek_r1", "glm45", "granite", "mistral", "openai_gptoss", "qwen3"]
TOOL_CALL_ALIASES: dict[str, ToolCallFormat] = {
    "glm47": "glm45", "granite4": "hermes", "llama4_json": "llama3_json", "pythonic": "llama4_pythonic",
    "qwen3_coder": "qwen3_xml", "qwen3_json": "hermes",
}  # fmt: skip
"""Names that vLLM has for the same format."""
REASONING_ALIASES: dict[str, ReasoningFormat] = {
    "deepseek_v3": "qwen3", "glm47": "glm45", "granite_thinking_parser": "qwen3", "holo2": "qwen3", "mimo": "qwen3",
    "nemotron_v3": "qwen3", "olmo3": "deepseek_r1", "step3": "deepseek_r1",
}  # fmt: skip


class FrontendConfig(HttpConfig):
    model: str = Field("", description=CHECKPOINT)
    revision: str | None = Field(None, description=REVISION)
    tokenizer: str | None = Field(None, description=TOKENIZER)
    chat_template: str | None = None
    """File with a Jinja chat template. Default: the checkpoint's."""
    served_model_name: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(as_list)] = Field(
        default_factory=list
    )
    """Model names that the API accepts; responses contain the first one. Default: the name of the model."""
    enable_lora: bool = Field(False, description=ENABLE_LORA)
    lora_modules: Texts = Field(default_factory=list)
    """LoRA adapter to serve, NAME=DIRECTORY. It may be given several times; requests name it as their model. Workers
    read the same directory."""
    max_lora_rank: int = Field(16, ge=1, le=512, description=MAX_LORA_RANK)
    scheduler_endpoint: Texts = Field(default_factory=lambda: ["ipc:///tmp/runahead/clients"], min_length=1)
    """Endpoint of the scheduler for frontends. It may be given several times, once for each engine."""
    engines: str | None = None
    """Engines in place of --scheduler-endpoint: a file with a line for each, ENDPOINT [PUBLIC_KEY [NAME]], which is
    read again when it changes; or dns://NAME:PORT, all addresses that NAME has, resolved again and again. Default:
    none."""
    placement_policy: str = "prefix_aware"
    """Policy that chooses the engine of a request, if there are several; or the name of an entry point."""
    record_placement: str | None = Field(None, min_length=1)
    """File for every event that enters placement and every decision, a line of JSON each, for `runahead replay`; each
    frontend needs one of its own. It has hashes of prompts, no text. Default: none."""
    control_socket: str | None = None
    """Unix socket of the supervisor that starts and stops engines for `runahead replan`; `runahead serve` sets it.
    Default: none."""
    max_body_bytes: Size = Field(8 * 1024 * 1024, ge=1024)
    """Maximum size of a request body, bytes."""
    allowed_media_domains: Texts = Field(default_factory=list)
    """Host name from which images and sounds at addresses are fetched, such as media.example.com; --backend vllm only.
    It takes several; names at private addresses are refused. Default: none."""
    stream_interval: int = Field(1, ge=1)
    """Tokens of an answer that an event of a stream has; the first one comes alone. More than 1 costs frontend and
    clients less, for short steps; a stop string is found up to so many tokens later. Requests may ask for more."""
    unknown_parameters: Literal["warn", "refuse", "ignore"] = "warn"
    """Treatment of fields of a request body that neither OpenAI nor vLLM has: ignored with a log line and a response
    header (warn), refused with status 400 (refuse), or ignored (ignore)."""
    enable_admin_routes: bool = False
    """Serve the routes that show and change the engines: /reset_prefix_cache, /v1/cache, /engines, and those that load
    and unload LoRA adapters."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds without a new token, or without an end, after which a request ends with status 504."""
    max_open_requests: int = Field(4096, ge=1)
    """Maximum number of open requests in one frontend. More are refused with status 429."""
    response_store: bool = True
    """Keep responses of /v1/responses for an hour. previous_response_id and background need them."""
    response_store_dir: str | None = Field(None, min_length=1)
    """Directory in which responses of /v1/responses are kept, at most 1 GiB. Frontends that share it serve the
    responses of one another, and go on with those of one that is lost. Default: a private one in memory, at most 64
    MiB."""
    step_ring: int = Field(1024, ge=0, le=65536)
    """Number of step records that are kept for /debug/steps, `runahead trace` and the page. 0: none; the scheduler then
    sends none."""
    otlp_traces_endpoint: str | None = Field(None, pattern=r"^https?://[^/\s]+")
    """Endpoint for OpenTelemetry traces of requests, such as http://localhost:4317. The variable
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL chooses grpc (default) or http/protobuf, whose endpoint ends with /v1/traces.
    Needs the extra otel. Default: none."""
    enable_auto_tool_choice: bool | None = None
    """Let the model decide whether to call a tool. Default: on if the format of its calls is known."""
    tool_call_parser: Annotated[
        Literal["auto", "none", ToolCallFormat], BeforeValidator(lambda name: TOOL_CALL_ALIASES.get(str(name), name))
    ] = "auto"
    """Format of tool calls in the output of the model: the one that its chat template shows (auto), no calls (none), or
    a format by name. Qwen 2.5 and 3 use hermes, Qwen 3 Coder qwen3_xml, gpt-oss openai."""
    reasoning_parser: Annotated[
        Literal["auto", "none", ReasoningFormat], BeforeValidator(lambda name: REASONING_ALIASES.get(str(name), name))
    ] = "auto"
    """Format of reasoning in the output of the model: the one that its chat template shows (auto); no reasoning (none);
    between <think> and </think>, always present (deepseek_r1) or present if the answer begins with <think> (qwen3,
    glm45); between the same words in brackets (mistral); after a sentence (granite); in a channel (openai_gptoss)."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """Default sampling parameters of requests: the checkpoint's (auto) or none (vllm). Its max_new_tokens is the
    default of max_tokens for chat."""
    override_generation_config: Annotated[dict[str, float], BeforeValidator(from_json)] = Field({})
    """Default sampling parameters that replace the checkpoint's, as JSON, such as {"temperature": 0.6}. max_new_tokens
    limits all answers, whatever their requests say. Default: none."""
    default_chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(from_json)] = Field({})
    """Variables of the chat template for requests that do not set them, as JSON, such as {"enable_thinking": false}.
    Default: none."""
    pooling_type: Literal["last", "mean"] = "last"
    """Hidden state that an embedding is made of: that of the last token (last) or the mean of all tokens (mean)."""

    @field_validator("allowed_media_domains")
    @classmethod
    def _check_domains(cls, names: list[str]) -> list[str]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", name):
                raise ValueError(f"{name!r} is no host name such as media.example.com; it has no port and no pattern")
        return [name.lower() for name in names]

    @field_validator("override_generation_config")
    @classmethod
    def _check_defaults(cls, given: dict[str, float]) -> dict[str, float]:
        known = *DEFAULT_PARAMETERS, MAX_NEW_TOKENS
        if unknown := given.keys() - set(known):
            raise ValueError(f"{min(unknown)} has no default, only {', '.join(known)}")
        values: dict[str, Any] = {**given, "top_k": max(given.get("top_k", 0), 0)}
        if not 1 <= values.pop(MAX_NEW_TOKENS, 1) < 2**31:
            raise ValueError(f"{MAX_NEW_TOKENS} must be at least 1 and less than 2^31")
        SamplingParams(1, **values)
        return given

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        engines = self.engines or ""
        if engines and "scheduler_endpoint" in self.model_fields_set:
            yield "--engines lists the schedulers; it cannot be combined with --scheduler-endpoint"
        if engines.startswith("dns://") and not re.fullmatch(r"dns://[^/:\s]+:\d{1,5}", engines):
            yield "--engines: a name is given with its port, such as dns://engines.llm.svc:5601"
        if self.lora_modules and not self.enable_lora:
            yield "--lora-modules needs --enable-lora"
        if self.response_store_dir is not None and not self.response_store:
            yield "--response-store-dir cannot be combined with --no-response-store"
        if self.enable_auto_tool_choice and self.tool_call_parser == "none":
            yield "--enable-auto-tool-choice needs a format of calls, not --tool-call-parser none"
