"""Settings of the scheduler."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from protocol.kv_groups import MAX_GROUPS
from services.config.base import ENABLE_LORA, MAX_LORA_RANK, REVISION, TOKENIZER, ServiceConfig, from_json
from services.config.kv_events import KVEventsConfig
from services.config.sizes import Size
from services.config.speculation import SpeculativeConfig


class SchedulerConfig(ServiceConfig):
    worker_endpoint: str = "ipc:///tmp/runahead/workers"
    """Endpoint that workers connect to, ipc://PATH or tcp://HOST:PORT."""
    client_endpoint: str = "ipc:///tmp/runahead/clients"
    """Endpoint that frontends connect to, ipc://PATH or tcp://HOST:PORT."""
    model: str = ""
    """Directory or Hugging Face name of the checkpoint, for the tokenizer that structured output needs. Default:
    SmolLM2-135M-Instruct, if it is installed."""
    revision: str | None = Field(None, description=REVISION)
    tokenizer: str | None = Field(None, description=TOKENIZER)
    block_size: int = Field(16, ge=1, le=1024)
    """Tokens per KV-cache block. serve --backend vllm on a CPU: 32."""
    num_gpu_blocks_override: int | None = Field(None, ge=2)
    """Number of KV-cache blocks. Default: as many as the workers can hold."""
    max_model_len: Size | None = Field(None, ge=2)
    """Context length, tokens, such as 8192 or 8K. Default: the checkpoint's."""
    max_num_seqs: int = Field(256, ge=1, le=65536)
    """Maximum number of running requests."""
    max_num_batched_tokens: Size = Field(2048, ge=1)
    """Maximum number of tokens in one step."""
    long_prefill_token_threshold: int = Field(0, ge=0)
    """Maximum number of prompt tokens of one request in one step. 0: no limit."""
    enable_prefix_caching: bool = True
    """Share KV-cache blocks between requests with equal prefixes."""
    disable_hybrid_kv_cache_manager: bool = False
    """Give all layers one block table that keeps every token, also layers that read a window only."""
    role: Literal["both", "prefill", "decode"] = "both"
    """Requests that frontends with several engines send here: long prompts only (prefill), or the rest (decode), which
    loads the KV blocks of these prompts. An engine does both where no other one can."""
    enable_lora: bool = Field(False, description=ENABLE_LORA)
    max_loras: int = Field(1, ge=1, le=256)
    """Maximum number of LoRA adapters in one step."""
    max_lora_rank: int = Field(16, ge=1, le=512, description=MAX_LORA_RANK)
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: by arrival (fcfs) or by priority."""
    batching_policy: str | None = Field(None, min_length=1)
    """Which phases share a step: chunked prefill and decode together (chunked), the same in even microbatches for
    pipeline stages (balanced), or never both, for devices that cannot mix them (phased); or the name of a policy that
    an installed package registers. Default: chunked, or balanced with more than one stage."""
    phased_interleave: bool = True
    """phased: allow no two consecutive prefill steps while a request is decoding."""
    phased_max_volume: int = Field(0, ge=0)
    """phased: maximum of rows times longest context in a decode step, tokens. 0: no limit."""
    phased_pausing: bool = False
    """phased: let decodes that exceed the volume together pause in turn, instead of delaying new requests."""
    batch_queue_depth: int | None = Field(None, ge=1, le=64)
    """Maximum number of steps in flight, at most 8 or twice the stages; 1 is synchronous. Default: 2, or stages + 1
    with more than one stage."""
    tensor_parallel_size: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = 1
    """Workers that share each layer. auto: as many as have registered and the model allows."""
    pipeline_parallel_size: int = Field(1, ge=1, le=256)
    """Number of stages that the layers are divided into."""
    settle_seconds: float = Field(5.0, ge=0)
    """auto: seconds without a change of membership before a group is formed."""
    max_spare_workers: int = Field(8, ge=0)
    """Maximum number of workers that wait as replacements for a lost one."""
    heartbeat_timeout_seconds: float = Field(5.0, gt=0)
    """Seconds without a heartbeat after which a worker counts as lost."""
    step_timeout_seconds: float = Field(60.0, gt=0)
    """Time limit of a step whose size was not measured yet, seconds: the first one of a size may compile. Others have
    ten times what steps of their size take, at least 5 s. Workers that exceed the limit count as hung."""
    load_timeout_seconds: float = Field(120.0, gt=0)
    """Seconds within which a group of workers that loads must report progress or use processor time. Otherwise it
    counts as hung."""
    async_scheduling: bool | None = None
    """Run ahead of the workers; off: one step in flight, or one per stage. Default: on."""
    max_num_queued_reqs: int = Field(1024, ge=1)
    """Maximum number of waiting requests. More are refused with status 429."""
    max_num_queued_tokens: Size = Field(4_194_304, ge=1)
    """Maximum number of prompt tokens of waiting requests. More are refused with status 429."""
    max_queue_seconds: float = Field(600.0, gt=0)
    """Longest time that a new request may be expected to wait for its first step, seconds. The estimate is made from
    measured rates; requests that would wait longer are refused with status 429."""
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(from_json)] = None
    """Speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 3}. Default: none."""
    step_trace: str | None = None
    """File for a JSON line per step: its rows and its times on every rank. Default: none."""

    record: str | None = Field(None, min_length=1)
    """Directory for a recording of every event that enters the scheduler and of every plan, for `runahead replay`. It
    is made with mode 0700. Default: none."""
    record_max_bytes: Size = Field(4 << 30, ge=1 << 20)
    """Maximum size of all recordings in the directory, bytes, such as 4G. The oldest parts are deleted."""
    record_tokens: bool = False
    """Record the tokens of prompts and answers, grammars and salts, too. Default: only lengths, keyed hashes of blocks,
    and outcomes."""

    kv_events_config: Annotated[KVEventsConfig | None, BeforeValidator(from_json)] = None
    """Publish the changes of the prefix cache in vLLM's format, as JSON: {"enable_kv_cache_events": true, "endpoint":
    "ipc:///run/runahead/kv-events"}. The events contain prompts and answers as token ids. Default: none."""

    @property
    def depth(self) -> int:
        """Depth of the batch queue, in steps."""
        stages = self.pipeline_parallel_size
        return self.batch_queue_depth or stages + (self.async_scheduling is not False)

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a row."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config is not None else 0

    @property
    def num_loras(self) -> int:
        """Maximum number of adapters in one step; 0: none are served."""
        return self.max_loras if self.enable_lora else 0

    @property
    def max_kv_groups(self) -> int:
        """Maximum number of block tables per request. 1 where every position stays in use: a drafter with a cache reads
        it through the same table, and `phased` pads prompts to lengths that a window may not serve."""
        s, policy = self.speculative_config, self.policy
        plain = self.disable_hybrid_kv_cache_manager or policy == "phased" or (s is not None and s.has_kv_cache)
        return 1 if plain else MAX_GROUPS

    @property
    def policy(self) -> str:
        """Name of the batching policy: built-in, or an entry point of the group `runahead.policies`."""
        return self.batching_policy or ("balanced" if self.pipeline_parallel_size > 1 else "chunked")

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        depth, ahead, stages = self.batch_queue_depth, self.async_scheduling, self.pipeline_parallel_size
        if depth is not None and ahead is not None and (depth > stages) != ahead:
            given = "--async-scheduling" if ahead else "--no-async-scheduling"
            yield f"{given} contradicts --batch-queue-depth {depth}; leave one of them out"
        most = max(8, 2 * stages)
        if depth is not None and not stages <= depth <= most:
            yield f"--batch-queue-depth {depth} must lie between {stages} and {most}"
        if self.record_tokens and self.record is None:
            yield "--record-tokens needs --record DIR"
        if self.enable_lora and self.policy == "phased":
            yield (
                "--enable-lora: a phased step would wait for a prompt whose adapter has no seat; use "
                "--batching-policy chunked"
            )
        if self.batching_policy == "phased" and self.max_num_batched_tokens % self.block_size:
            yield (
                f"--batching-policy phased: --max-num-batched-tokens {self.max_num_batched_tokens} must be a multiple "
                f"of --block-size {self.block_size}"
            )
        longest = self.max_model_len or 1
        least = (-(-longest // self.block_size) + 1) * self.block_size
        if self.batching_policy == "phased" and 0 < self.phased_max_volume < least:
            yield (
                f"--phased-max-volume {self.phased_max_volume} cannot hold a request of {longest} tokens; it takes "
                f"{least}"
            )
