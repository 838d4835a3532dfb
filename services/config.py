"""One frozen configuration per service. Every default stands here once, with its unit.

Flags, environment (`RUNAHEAD_MAX_NUM_SEQS`) and the YAML file (`max-num-seqs`) read the same names.
"""

import json
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServiceConfig(_Config):
    """What every service takes."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe messages on stderr"
    )


class SpeculativeConfig(_Config):
    """How drafts are proposed and how many. vLLM's field names."""

    method: Literal["ngram", "eagle", "eagle3", "draft_model"]
    num_speculative_tokens: int = Field(ge=1, le=16)
    model: str = ""
    """Directory or Hugging Face name of the drafter's checkpoint. The demo model has an eagle head of its own, which is
    meant where none is named."""
    revision: str | None = None
    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence that the drafter drafts for; default: its checkpoint's."""
    prompt_lookup_min: int = Field(2, ge=1, le=64)
    """ngram: tokens that a match has at least."""
    prompt_lookup_max: int = Field(5, ge=1, le=64)
    adaptive: bool = True
    """Fewer drafts while few are accepted or many requests run; off: always `num_speculative_tokens`."""

    @property
    def keeps_kv(self) -> bool:
        """Whether the drafter has keys and values of its own, also where its drafts will stand."""
        return self.method != "ngram"

    @model_validator(mode="after")
    def _method_has_what_it_needs(self) -> Self:
        if self.method == "ngram" and self.model:
            raise ValueError('"method": "ngram" has no model')
        if self.method in ("eagle3", "draft_model") and not self.model:
            raise ValueError(f'"method": "{self.method}" needs a "model"')
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError('"prompt_lookup_min" must not be above "prompt_lookup_max"')
        return self


def _from_json(value: object) -> object:
    """Flags and environment carry text, a file may hold the mapping itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


class SchedulerConfig(ServiceConfig):
    worker_endpoint: str = Field(
        "ipc:///tmp/runahead/workers", description="where workers connect (ipc:// or tcp://)"
    )
    client_endpoint: str = Field("ipc:///tmp/runahead/clients", description="where frontends connect")
    model: str = Field(
        "",
        description="directory or Hugging Face name of the checkpoint, whose tokenizer structured output needs; "
        "default: the demo model",
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub, for every file")
    tokenizer: str | None = Field(None, description="directory or name of another tokenizer")
    block_size: int = Field(16, ge=1, le=1024, description="tokens per KV-cache block")
    num_gpu_blocks_override: int | None = Field(
        None, ge=2, description="KV blocks, instead of what the workers can hold"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="context length in tokens; default: the checkpoint's"
    )
    max_num_seqs: int = Field(256, ge=1, le=65536, description="most requests running at once")
    max_num_batched_tokens: int = Field(2048, ge=1, description="most tokens in one step")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="most prompt tokens of one request in one step; 0: no limit"
    )
    enable_prefix_caching: bool = Field(
        True, description="share KV blocks between requests with equal prefixes"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="order of requests")
    batching_policy: Literal["chunked", "balanced", "phased"] | None = Field(
        None,
        description="what may share a step: chunked prefill and decode together, balanced microbatches for pipeline "
        "stages, or phased (never both) for devices that cannot mix them; default: chunked, or balanced with stages",
    )
    phased_interleave: bool = Field(
        True, description="phased: no two prefill steps in a row while a request is decoding"
    )
    phased_max_volume: int = Field(
        0, ge=0, description="phased: most tokens of rows times longest context in a decode step; 0: no limit"
    )
    phased_pausing: bool = Field(
        False,
        description="phased: decodes that exceed the volume together pause in turn, newcomers are not held back for it",
    )
    batch_queue_depth: int | None = Field(
        None,
        ge=1,
        le=64,
        description="steps in flight; 1 is synchronous; default: 2, or stages + 1; at most 8, or twice the stages",
    )
    tensor_parallel_size: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="workers that share each layer; auto: as many as have registered and the model allows"
    )
    pipeline_parallel_size: int = Field(1, ge=1, le=256, description="stages that the layers are cut into")
    settle_seconds: float = Field(
        5.0, ge=0, description="auto: seconds without a change of membership until a group is formed"
    )
    max_spare_workers: int = Field(8, ge=0, description="workers that may wait to replace a lost one")
    heartbeat_timeout_seconds: float = Field(
        5.0, gt=0, description="silence after which a worker counts as lost, seconds"
    )
    recovery_timeout_seconds: float = Field(
        300.0, gt=0, description="open requests fail when lost workers are not replaced for so long, seconds"
    )
    step_timeout_seconds: float = Field(
        60.0, gt=0, description="least time a step may take until the workers count as hung, seconds"
    )
    async_scheduling: bool | None = Field(
        None, description="run ahead of the workers (the default); off means depth 1"
    )
    max_num_queued_reqs: int = Field(
        1024, ge=1, description="most requests waiting; more are refused with 429"
    )
    max_num_queued_tokens: int = Field(
        4_194_304, ge=1, description="most prompt tokens waiting; more are refused with 429"
    )
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_from_json)] = Field(
        None,
        description='speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 3}; default: none',
    )
    step_trace: str | None = Field(
        None, description="file that gets a JSON line when a step is scheduled or its result arrives"
    )

    @property
    def depth(self) -> int:
        """Steps in flight: the batch queue's depth."""
        stages = self.pipeline_parallel_size
        return self.batch_queue_depth or stages + (self.async_scheduling is not False)

    @property
    def policy(self) -> Literal["chunked", "balanced", "phased"]:
        """The batching policy, chosen or by default."""
        return self.batching_policy or ("balanced" if self.pipeline_parallel_size > 1 else "chunked")

    @model_validator(mode="after")
    def _depth_is_one_thing(self) -> Self:
        depth, ahead, stages = self.batch_queue_depth, self.async_scheduling, self.pipeline_parallel_size
        if depth is not None and ahead is not None and (depth > stages) != ahead:
            flag = "--async-scheduling" if ahead else "--no-async-scheduling"
            raise ValueError(f"{flag} contradicts --batch-queue-depth {depth}; leave one of them out")
        most = max(8, 2 * stages)
        if depth is not None and not stages <= depth <= most:
            raise ValueError(f"--batch-queue-depth {depth} must lie between {stages} and {most}")
        return self

    @model_validator(mode="after")
    def _phases_have_a_shape(self) -> Self:
        if self.batching_policy == "phased" and self.max_num_batched_tokens % self.block_size:
            raise ValueError(
                f"--batching-policy phased: --max-num-batched-tokens {self.max_num_batched_tokens} must be a multiple "
                f"of --block-size {self.block_size}"
            )
        return self


class WorkerConfig(ServiceConfig):
    model: str = Field(
        "", description="directory or Hugging Face name of the checkpoint; default: the demo model"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub, for every file")
    scheduler_endpoint: str = Field(
        "ipc:///tmp/runahead/workers", description="the scheduler's worker endpoint"
    )
    backend: Literal["native", "sim", "vllm"] = Field(
        "native", description="native computes; vllm lets vLLM compute; sim verifies and sleeps"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: the checkpoint's (demo model: float32)"
    )
    device: Literal["cpu"] = Field("cpu", description="where the native backend computes")
    threads: int = Field(
        0, ge=0, description="compute threads; 0: one per core, shared with the group's ranks on this machine"
    )
    host_ip: str = Field(
        "",
        description="address at which other ranks reach this one; default: that of the route to the scheduler",
    )
    kv_cache_memory_bytes: int = Field(
        0, ge=0, description="bytes for the KV cache; 0: a share of free memory"
    )
    quantization: str | None = Field(
        None, description="vllm: how the weights are quantised; default: what the checkpoint says"
    )
    load_format: str = Field("auto", description="vllm: how the weights are read")
    enforce_eager: bool = Field(
        False, description="vllm: do not compile the model: starts sooner, computes slower"
    )
    sim_step_ms: float = Field(5.0, ge=0, description="sim: base cost of a step, milliseconds")
    sim_prefill_token_us: float = Field(5.0, ge=0, description="sim: cost per prompt token, microseconds")
    sim_decode_us: float = Field(0.0, ge=0, description="sim: cost per decoding request, microseconds")
    sim_weights_ms: float = Field(
        0.0, ge=0, description="sim: least cost of a step's tokens: reading the weights, milliseconds"
    )
    sim_context_token_ns: float = Field(0.0, ge=0, description="sim: cost per token of context, nanoseconds")
    sim_hop_ms: float = Field(
        0.0, ge=0, description="sim: time from one pipeline stage to the next, milliseconds"
    )
    sim_hop_token_us: float = Field(0.0, ge=0, description="sim: the same per token, microseconds")
    sim_trace: str = Field(
        "", description="sim: file that gets a JSON line when a step has ended on this stage; empty: none"
    )
    sim_rigid: bool = Field(
        False,
        description="sim: a device with padded shapes that refuses steps with prefill and decode together",
    )
    sim_max_volume: int = Field(
        0, ge=0, description="sim, rigid: most tokens of rows times longest row in a decode step; 0: no limit"
    )
    sim_vocab_size: int = Field(0, ge=0, description="sim: width of the logits row; 0: the model's tokenizer")
    sim_draft_acceptance: Literal["always", "never", "periodic", "request"] = Field(
        "periodic",
        description="sim: which drafts hold: all, none, all but those at every third position of a sequence, or by "
        "prompt and seed all, none or all but every second, third or fifth",
    )
    sim_draft_ms: float = Field(
        0.0, ge=0, description="sim: cost of proposing one draft for each request, milliseconds"
    )

    @property
    def backend_name(self) -> str:
        """As the capability table knows it."""
        return "sim rigid" if self.backend == "sim" and self.sim_rigid else self.backend


class FrontendConfig(ServiceConfig):
    model: str = Field(
        "", description="directory or Hugging Face name of the checkpoint; default: the demo model"
    )
    revision: str | None = Field(None, description="branch, tag or commit on the hub, for every file")
    tokenizer: str | None = Field(None, description="directory or name of another tokenizer")
    chat_template: str | None = Field(
        None, description="file with a jinja chat template, instead of the checkpoint's"
    )
    served_model_name: list[str] = Field(
        default_factory=list, description="names the API answers to; default: the model's"
    )
    scheduler_endpoint: str = Field(
        "ipc:///tmp/runahead/clients", description="the scheduler's client endpoint"
    )
    host: str = Field("127.0.0.1", description="address of the HTTP server")
    port: int = Field(8000, ge=0, le=65535, description="port of the HTTP server; 0: any free one")
    api_key: list[str] = Field(
        default_factory=list, description="keys that clients must present as bearer tokens"
    )
    api_key_file: str | None = Field(
        None, description="file with more such keys, one per line: a secret of Docker or Kubernetes"
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="largest request body, bytes")
    max_open_requests: int = Field(
        4096, ge=1, description="most requests open in one frontend; more are refused with 429"
    )
    enable_auto_tool_choice: bool = Field(
        False, description="let the model decide whether to call a tool; needs --tool-call-parser"
    )
    tool_call_parser: Literal["hermes", "llama3_json", "mistral"] | None = Field(
        None, description="how the model writes tool calls; hermes is also Qwen's way"
    )
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = Field(
        None,
        description="the model thinks between <think> and </think>: always (deepseek_r1), or if it says so (qwen3)",
    )
    generation_config: Literal["auto", "vllm"] = Field(
        "auto", description="auto: the checkpoint's sampling defaults; vllm: none"
    )
    pooling_type: Literal["last", "mean"] = Field(
        "last", description="what an embedding is made of: the state of its last token, or the mean of all"
    )

    @model_validator(mode="after")
    def _calls_can_be_read(self) -> Self:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser")
        return self


class ServeConfig(FrontendConfig, SchedulerConfig, WorkerConfig):
    """All three services on one machine. The endpoints are `serve`'s own business: no flag sets them."""

    @property
    def num_workers(self) -> int:
        """Ranks of one group; `serve` starts one worker for each."""
        tp = self.tensor_parallel_size
        return self.pipeline_parallel_size * (1 if tp == "auto" else tp)

    @model_validator(mode="after")
    def _size_is_a_number(self) -> Self:
        if self.tensor_parallel_size == "auto":
            raise ValueError(
                "--tensor-parallel-size auto is for workers that come by themselves (runahead scheduler); "
                "serve starts them and needs a number"
            )
        return self

    def of(self, service: type[ServiceConfig]) -> dict[str, object]:
        """The values of one service's fields, those that were set."""
        return self.model_dump(include=set(service.model_fields), exclude_unset=True)


ENDPOINTS = frozenset({"worker_endpoint", "client_endpoint", "scheduler_endpoint"})
"""Fields that hold the sockets between services."""


class BenchConfig(_Config):
    """`runahead bench`; vLLM's names where the meaning is the same."""

    base_url: str = Field("http://127.0.0.1:8000", pattern="^https?://", description="server, without /v1")
    model: str = Field("", description="model name in the requests; default: the server's first")
    api_key: str = Field("", description="bearer token")
    num_prompts: int = Field(64, ge=1, description="requests in all")
    max_concurrency: int | None = Field(
        None, ge=1, description="most requests open at once (closed loop); default: no limit"
    )
    request_rate: float | None = Field(
        None, gt=0, description="requests per second, Poisson arrivals (open loop); default: all at once"
    )
    random_input_len: int = Field(128, ge=1, description="prompt length, tokens")
    random_output_len: int = Field(128, ge=1, description="output length, tokens")
    random_id_low: int = Field(300, ge=0, description="least token id in a prompt")
    random_id_high: int = Field(1000, ge=1, description="token ids in prompts stay below this")
    temperature: float = Field(0.0, ge=0, description="sampling temperature")
    seed: int = Field(0, ge=0, description="of prompts and arrival times")
    ignore_eos: bool = Field(
        False, description="do not stop at the end-of-text token, so that lengths are fixed"
    )
    num_warmups: int = Field(0, ge=0, description="requests before the measurement")
    timeout: float = Field(600.0, gt=0, description="longest request, seconds")
    save_result: bool = Field(False, description="write the figures as JSON")
    result_filename: str = Field("", description="where to; default: bench-TIME.json")

    @model_validator(mode="after")
    def _ids_form_a_range(self) -> Self:
        if self.random_id_high <= self.random_id_low:
            raise ValueError(
                f"--random-id-high {self.random_id_high} must be above --random-id-low {self.random_id_low}"
            )
        return self
