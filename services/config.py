"""One frozen configuration per service: every setting with its unit, limits and default.

A setting has the same name as a flag (`--max-num-seqs`), in the environment (`RUNAHEAD_MAX_NUM_SEQS`) and in the YAML
file (`max-num-seqs`). Its description is the help text of the flag.
"""

import json
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ServiceConfig(_Config):
    """Settings of every service."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest severity of messages on stderr."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Form of messages on stderr: lines of text, or a JSON object per line."
    )
    scheduler_timeout_seconds: float = Field(
        10.0,
        ge=2,
        description="Seconds without a message from the scheduler after which frontends and workers look for another "
        "one. A scheduler that did not run for so long exits.",
    )
    recovery_timeout_seconds: float = Field(
        300.0,
        gt=0,
        description="Seconds that open requests wait for the replacement of a lost worker or scheduler before they "
        "fail, and that a worker waits for another scheduler before it exits.",
    )


class SpeculativeConfig(_Config):
    """Method and number of drafts in speculative decoding. The field names are vLLM's."""

    method: Literal["ngram", "eagle", "eagle3", "draft_model"]
    num_speculative_tokens: int = Field(ge=1, le=16)
    model: str = ""
    """Directory or Hugging Face name of the drafter's checkpoint. Empty with "eagle": the head of the demo model."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest sequence that gets drafts, tokens. None: the limit of the drafter's checkpoint."""
    prompt_lookup_min: int = Field(2, ge=1, le=64)
    """ngram: shortest match, tokens."""
    prompt_lookup_max: int = Field(5, ge=1, le=64)
    """ngram: longest match, tokens."""
    adaptive: bool = True
    """Propose fewer drafts while few are accepted or many requests run. False: always `num_speculative_tokens`."""

    @property
    def has_kv_cache(self) -> bool:
        """True if the drafter has a KV cache of its own, which also needs blocks for the positions of drafts."""
        return self.method != "ngram"

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.method == "ngram" and self.model:
            raise ValueError('"method": "ngram" has no model')
        if self.method in ("eagle3", "draft_model") and not self.model:
            raise ValueError(f'"method": "{self.method}" needs a "model"')
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError('"prompt_lookup_min" must not be above "prompt_lookup_max"')
        return self


def _from_json(value: object) -> object:
    """Parse JSON from a flag or the environment. A file may contain the mapping itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None


class SchedulerConfig(ServiceConfig):
    worker_endpoint: str = Field(
        "ipc:///tmp/runahead/workers",
        description="Endpoint that workers connect to, ipc://PATH or tcp://HOST:PORT.",
    )
    client_endpoint: str = Field(
        "ipc:///tmp/runahead/clients",
        description="Endpoint that frontends connect to, ipc://PATH or tcp://HOST:PORT.",
    )
    model: str = Field(
        "",
        description="Directory or Hugging Face name of the checkpoint, for the tokenizer that structured output "
        "needs. Default: SmolLM2-135M-Instruct, if it is installed.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit on the hub, for every file. Default: the main branch."
    )
    tokenizer: str | None = Field(
        None, description="Directory or Hugging Face name of another tokenizer. Default: the checkpoint's."
    )
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per KV-cache block.")
    num_gpu_blocks_override: int | None = Field(
        None, ge=2, description="Number of KV-cache blocks. Default: as many as the workers can hold."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Context length, tokens. Default: the checkpoint's."
    )
    max_num_seqs: int = Field(256, ge=1, le=65536, description="Maximum number of running requests.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Maximum number of tokens in one step.")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Maximum number of prompt tokens of one request in one step. 0: no limit."
    )
    enable_prefix_caching: bool = Field(
        True, description="Share KV-cache blocks between requests with equal prefixes."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs", description="Order of waiting requests: by arrival (fcfs) or by priority."
    )
    batching_policy: str | None = Field(
        None,
        min_length=1,
        description="Which phases share a step: chunked prefill and decode together (chunked), the same in "
        "even microbatches for pipeline stages (balanced), or never both, for devices that "
        "cannot mix them (phased); or the name of a policy that an installed package registers. Default: "
        "chunked, or balanced with more than one stage.",
    )
    phased_interleave: bool = Field(
        True, description="phased: allow no two consecutive prefill steps while a request is decoding."
    )
    phased_max_volume: int = Field(
        0,
        ge=0,
        description="phased: maximum of rows times longest context in a decode step, tokens. 0: no limit.",
    )
    phased_pausing: bool = Field(
        False,
        description="phased: let decodes that exceed the volume together pause in turn, instead of delaying "
        "new requests.",
    )
    batch_queue_depth: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Maximum number of steps in flight, at most 8 or twice the stages; 1 is synchronous. "
        "Default: 2, or stages + 1 with more than one stage.",
    )
    tensor_parallel_size: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="Workers that share each layer. auto: as many as have registered and the model allows."
    )
    pipeline_parallel_size: int = Field(
        1, ge=1, le=256, description="Number of stages that the layers are divided into."
    )
    settle_seconds: float = Field(
        5.0, ge=0, description="auto: seconds without a change of membership before a group is formed."
    )
    max_spare_workers: int = Field(
        8, ge=0, description="Maximum number of workers that wait as replacements for a lost one."
    )
    heartbeat_timeout_seconds: float = Field(
        5.0, gt=0, description="Seconds without a heartbeat after which a worker counts as lost."
    )
    step_timeout_seconds: float = Field(
        60.0,
        gt=0,
        description="Lower bound of a step's time limit, seconds. Workers that exceed the limit count as hung.",
    )
    async_scheduling: bool | None = Field(
        None, description="Run ahead of the workers; off: one step in flight, or one per stage. Default: on."
    )
    max_num_queued_reqs: int = Field(
        1024, ge=1, description="Maximum number of waiting requests. More are refused with status 429."
    )
    max_num_queued_tokens: int = Field(
        4_194_304,
        ge=1,
        description="Maximum number of prompt tokens of waiting requests. More are refused with status 429.",
    )
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(_from_json)] = Field(
        None,
        description='Speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 3}. '
        "Default: none.",
    )
    step_trace: str | None = Field(
        None,
        description="File for a JSON line per step: its rows and its times on every rank. Default: none.",
    )

    @property
    def depth(self) -> int:
        """Depth of the batch queue, in steps."""
        stages = self.pipeline_parallel_size
        return self.batch_queue_depth or stages + (self.async_scheduling is not False)

    @property
    def policy(self) -> str:
        """Name of the batching policy: built-in, or an entry point of the group `runahead.policies`."""
        return self.batching_policy or ("balanced" if self.pipeline_parallel_size > 1 else "chunked")

    @model_validator(mode="after")
    def _check_depth(self) -> Self:
        depth, ahead, stages = self.batch_queue_depth, self.async_scheduling, self.pipeline_parallel_size
        if depth is not None and ahead is not None and (depth > stages) != ahead:
            flag = "--async-scheduling" if ahead else "--no-async-scheduling"
            raise ValueError(f"{flag} contradicts --batch-queue-depth {depth}; leave one of them out")
        most = max(8, 2 * stages)
        if depth is not None and not stages <= depth <= most:
            raise ValueError(f"--batch-queue-depth {depth} must lie between {stages} and {most}")
        return self

    @model_validator(mode="after")
    def _check_phased(self) -> Self:
        if self.batching_policy == "phased" and self.max_num_batched_tokens % self.block_size:
            raise ValueError(
                f"--batching-policy phased: --max-num-batched-tokens {self.max_num_batched_tokens} must be a multiple "
                f"of --block-size {self.block_size}"
            )
        return self


class WorkerConfig(ServiceConfig):
    model: str = Field(
        "",
        description="Directory, GGUF file or Hugging Face name of the checkpoint; NAME:Q4_K_M is one of several GGUF "
        "files there. Default: SmolLM2-135M-Instruct, if it is installed.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit on the hub, for every file. Default: the main branch."
    )
    scheduler_endpoint: str = Field(
        "ipc:///tmp/runahead/workers", description="Endpoint of the scheduler for workers."
    )
    backend: Literal["native", "sim", "vllm"] = Field(
        "native",
        description="Implementation of the forward pass: Runahead's own (native), vLLM (vllm), or a "
        "simulator that verifies the plans and sleeps (sim).",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Data type of weights and KV cache. auto: the checkpoint's; float32 for the demo model.",
    )
    device: Literal["cpu"] = Field("cpu", description="Device of the native backend.")
    kernels: Literal["auto", "compiled", "reference"] = Field(
        "auto",
        description="native: implementation of the kernels: compiled for this processor (compiled), or plain "
        "torch, slow, to check the others against (reference). auto: the fastest for device and processor.",
    )
    threads: int = Field(
        0,
        ge=0,
        description="Number of compute threads. 0: one per core, divided among the ranks of the group on "
        "this machine.",
    )
    host_ip: str = Field(
        "",
        description="Address at which other ranks connect to this one. Default: the address of the route to "
        "the scheduler.",
    )
    kv_cache_memory_bytes: int = Field(
        0, ge=0, description="Size of the KV cache, bytes. 0: a share of the free memory."
    )
    quantization: str | None = Field(
        None,
        description="native: type of the weights in memory, with groups of 32 inputs: int8, int4 (embedding and head "
        "int8), or none (the blocks of a GGUF file are dequantised). vllm: quantisation method of the weights. "
        "Default: the checkpoint's.",
    )
    batch_invariant: bool = Field(
        False,
        description="native: compute each row with the same bits whatever other rows are in its step, in bfloat16, "
        "int8 and int4 as in float32.",
    )
    load_format: str = Field("auto", description="vllm: file format of the weights.")
    enforce_eager: bool = Field(
        False, description="vllm: do not compile the model; it starts sooner and computes more slowly."
    )
    sim_step_ms: float = Field(5.0, ge=0, description="sim: base cost of a step, milliseconds.")
    sim_prefill_token_us: float = Field(5.0, ge=0, description="sim: cost per prompt token, microseconds.")
    sim_decode_us: float = Field(0.0, ge=0, description="sim: cost per decoding request, microseconds.")
    sim_weights_ms: float = Field(
        0.0, ge=0, description="sim: minimum cost of a step's tokens, for reading the weights, milliseconds."
    )
    sim_context_token_ns: float = Field(0.0, ge=0, description="sim: cost per token of context, nanoseconds.")
    sim_hop_ms: float = Field(
        0.0, ge=0, description="sim: transfer time from one pipeline stage to the next, milliseconds."
    )
    sim_hop_token_us: float = Field(
        0.0,
        ge=0,
        description="sim: transfer time from one pipeline stage to the next per token, microseconds.",
    )
    sim_trace: str = Field(
        "", description="sim: file for a JSON line per step that ended on this stage. Default: none."
    )
    sim_rigid: bool = Field(
        False,
        description="sim: simulate a device with padded shapes, which refuses steps with both prefill and "
        "decode.",
    )
    sim_max_volume: int = Field(
        0,
        ge=0,
        description="sim, rigid: maximum of rows times longest row in a decode step, tokens. 0: no limit.",
    )
    sim_vocab_size: int = Field(
        0, ge=0, description="sim: width of the logits. 0: the size of the model's tokenizer."
    )
    sim_draft_acceptance: Literal["always", "never", "periodic", "request"] = Field(
        "periodic",
        description="sim: which drafts are accepted: all (always), none (never), all except at every third "
        "position of a sequence (periodic), or a rule that follows from prompt and seed: all, "
        "none, or all except every second, third or fifth (request).",
    )
    sim_draft_ms: float = Field(
        0.0, ge=0, description="sim: cost of proposing one draft for each request, milliseconds."
    )

    @model_validator(mode="after")
    def _check_kernels(self) -> Self:
        if self.kernels != "auto" and self.backend != "native":
            raise ValueError(
                f"--kernels {self.kernels} chooses kernels of the native backend, not of --backend {self.backend}"
            )
        if self.batch_invariant and self.backend != "native":
            raise ValueError(
                f"--batch-invariant is a promise of the native backend; --backend {self.backend} does not give it"
            )
        if self.batch_invariant and self.kernels == "reference":
            raise ValueError(
                "--batch-invariant: --kernels reference does not give this promise; use compiled"
            )
        return self

    @model_validator(mode="after")
    def _check_quantization(self) -> Self:
        method, own = self.quantization, ("int8", "int4", "none")
        if self.backend == "native" and method not in (None, *own):
            raise ValueError(f"--quantization {method}: --backend native has {', '.join(own)}")
        if self.backend == "vllm" and method in own:
            raise ValueError(f"--quantization {method} is a type of --backend native, not a method of vLLM")
        if self.backend == "sim" and method is not None:
            raise ValueError(f"--quantization {method}: --backend sim has no weights")
        return self

    @property
    def backend_name(self) -> str:
        """Name of the backend in the capability table."""
        return "sim rigid" if self.backend == "sim" and self.sim_rigid else self.backend


class FrontendConfig(ServiceConfig):
    model: str = Field(
        "",
        description="Directory, GGUF file or Hugging Face name of the checkpoint; NAME:Q4_K_M is one of several GGUF "
        "files there. Default: SmolLM2-135M-Instruct, if it is installed.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit on the hub, for every file. Default: the main branch."
    )
    tokenizer: str | None = Field(
        None, description="Directory or Hugging Face name of another tokenizer. Default: the checkpoint's."
    )
    chat_template: str | None = Field(
        None, description="File with a Jinja chat template. Default: the checkpoint's."
    )
    served_model_name: list[str] = Field(
        default_factory=list,
        description="Model names that the API accepts; responses contain the first one. Default: the name "
        "of the model.",
    )
    scheduler_endpoint: str = Field(
        "ipc:///tmp/runahead/clients", description="Endpoint of the scheduler for frontends."
    )
    host: str = Field("127.0.0.1", description="Address of the HTTP server.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP server. 0: any free port.")
    api_key: list[str] = Field(
        default_factory=list,
        description="API keys, one of which every request must carry as its bearer token. Default: none.",
    )
    api_key_file: str | None = Field(
        None,
        description="File with API keys, one per line, such as a secret of Docker or Kubernetes. Default: "
        "none.",
    )
    max_body_bytes: int = Field(
        8 * 1024 * 1024, ge=1024, description="Maximum size of a request body, bytes."
    )
    unknown_parameters: Literal["warn", "refuse", "ignore"] = Field(
        "warn",
        description="Treatment of fields of a request body that neither OpenAI nor vLLM has: ignored with a log "
        "line and a response header (warn), refused with status 400 (refuse), or ignored (ignore).",
    )
    request_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds without a new token, or without an end, after which a request ends with status 504.",
    )
    max_open_requests: int = Field(
        4096,
        ge=1,
        description="Maximum number of open requests in one frontend. More are refused with status 429.",
    )
    response_store: bool = Field(
        True,
        description="Keep answers of /v1/responses in memory for an hour, at most 64 MiB, so that a request can "
        "continue one by previous_response_id.",
    )
    enable_auto_tool_choice: bool = Field(
        False, description="Let the model decide whether to call a tool. Needs --tool-call-parser."
    )
    tool_call_parser: Literal["hermes", "llama3_json", "mistral"] | None = Field(
        None,
        description="Format of tool calls in the output of the model; Qwen models use hermes. Default: none.",
    )
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = Field(
        None,
        description="Format of reasoning between <think> and </think>: always present (deepseek_r1), or "
        "present if the answer begins with <think> (qwen3). Default: none.",
    )
    generation_config: Literal["auto", "vllm"] = Field(
        "auto", description="Default sampling parameters of requests: the checkpoint's (auto) or none (vllm)."
    )
    pooling_type: Literal["last", "mean"] = Field(
        "last",
        description="Hidden state that an embedding is made of: that of the last token (last) or the mean "
        "of all tokens (mean).",
    )

    @model_validator(mode="after")
    def _check_tool_calls(self) -> Self:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser")
        return self


class ServeConfig(WorkerConfig, SchedulerConfig, FrontendConfig):
    """Settings of all three services on one machine.

    `serve` sets the endpoints itself, so they have no flags. `--help` lists the bases from last to first.
    """

    @property
    def num_workers(self) -> int:
        """Number of ranks of the group. `serve` starts one worker for each."""
        tp = self.tensor_parallel_size
        return self.pipeline_parallel_size * (1 if tp == "auto" else tp)

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if self.tensor_parallel_size == "auto":
            raise ValueError(
                "--tensor-parallel-size auto is for runahead scheduler, where workers register by themselves; "
                "serve starts the workers and needs a number"
            )
        return self

    def service_settings(self, service: type[ServiceConfig]) -> dict[str, object]:
        """Return those settings of one service that were given explicitly."""
        return self.model_dump(include=set(service.model_fields), exclude_unset=True)


ENDPOINTS = frozenset({"worker_endpoint", "client_endpoint", "scheduler_endpoint"})
"""Settings with the endpoint of a socket between services."""


class ConvertConfig(_Config):
    """Settings of `runahead convert`."""

    model: str = Field(
        "",
        description="GGUF file, or a directory or Hugging Face repository with one. Default: SmolLM2-135M-Instruct.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit on the hub. Default: the main branch."
    )
    out: str = Field(
        "",
        description="Directory to write, empty or new. Default: one per file in the user's cache directory.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the weights. auto: the file's; bfloat16 for quantised weights."
    )


class BenchConfig(_Config):
    """Settings of `runahead bench`. Names are those of `vllm bench serve` where the meaning is the same."""

    base_url: str = Field(
        "http://127.0.0.1:8000", pattern="^https?://", description="URL of the server, without /v1."
    )
    model: str = Field("", description="Model name in the requests. Default: the first one of the server.")
    api_key: str = Field("", description="Bearer token of the requests. Default: none.")
    num_prompts: int = Field(64, ge=1, description="Number of requests.")
    max_concurrency: int | None = Field(
        None, ge=1, description="Maximum number of requests open at once (closed loop). Default: no limit."
    )
    request_rate: float | None = Field(
        None,
        gt=0,
        description="Requests per second, with Poisson arrivals (open loop). Default: all requests at once.",
    )
    random_input_len: int = Field(128, ge=1, description="Length of each prompt, tokens.")
    random_output_len: int = Field(128, ge=1, description="Length of each output, tokens.")
    random_id_low: int = Field(300, ge=0, description="Lowest token id in prompts.")
    random_id_high: int = Field(1000, ge=1, description="Upper bound of the token ids in prompts, exclusive.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature.")
    seed: int = Field(0, ge=0, description="Seed of prompts and arrival times.")
    ignore_eos: bool = Field(
        False,
        description="Continue after the end-of-sequence token, so that all outputs have the same length.",
    )
    num_warmups: int = Field(0, ge=0, description="Number of requests before the measurement.")
    timeout: float = Field(600.0, gt=0, description="Maximum duration of a request, seconds.")
    save_result: bool = Field(False, description="Write the results as JSON.")
    result_filename: str = Field(
        "", description="File for the results; implies --save-result. Default: bench-TIME.json."
    )

    @model_validator(mode="after")
    def _check_token_ids(self) -> Self:
        if self.random_id_high <= self.random_id_low:
            raise ValueError(
                f"--random-id-high {self.random_id_high} must be above --random-id-low {self.random_id_low}"
            )
        return self


SERVICES: dict[str, type[ServiceConfig]] = {
    "frontend": FrontendConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
}
"""In the order in which they are stopped: first the frontend, which has the open requests."""
