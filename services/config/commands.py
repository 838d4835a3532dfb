"""Settings of the commands beside `serve` and the services."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from services.config.base import BaseConfig, ClientConfig, ServiceConfig, from_json
from services.config.http import HttpConfig
from services.config.serve import CONNECTION, OMITTED, ServeConfig
from services.config.sizes import Size
from services.config.speculation import SpeculativeConfig


class ServerConfig(ClientConfig):
    """Settings of a command about a running server."""

    url: str = "http://127.0.0.1:8000"
    """URL of the server, with or without /v1."""


class ShowConfig(ServerConfig):
    """Settings of `runahead status` and `runahead engines`."""

    as_json: bool = False
    """Print JSON."""


class DrainConfig(ServerConfig):
    engine: str
    """Name of the engine."""
    cancel: bool = False
    """Let it take requests again."""


class ReplanConfig(ServerConfig):
    settings: list[str] = Field(default_factory=list)
    """Flags of `runahead serve`; the URL may precede them."""
    timeout: float = Field(600.0, ge=1)
    """Seconds until the new engine must be ready."""
    drain_timeout: float = Field(60.0, ge=0)
    """Seconds until streams that cannot move are ended."""


class TraceConfig(ServerConfig):
    output: str
    """File to write."""
    seconds: float = Field(0.0, ge=0)
    """Record this long from now on. 0: what the server has kept."""


class KeeperConfig(BaseConfig):
    """Settings of `runahead kv-keeper`."""

    path: str
    """Socket to make, for --kv-keeper of workers."""
    recovery_timeout_seconds: float = Field(300.0, ge=1)
    """Seconds after which memory that no worker has is freed."""


class BenchConfig(ClientConfig):
    """Settings of `runahead bench`. Names are those of `vllm bench serve` where the meaning is the same."""

    base_url: str = Field("http://127.0.0.1:8000", pattern=r"^https?://[^/\s]")
    """URL of the server, with or without /v1."""
    model: str = ""
    """Model name in the requests. Default: the first one of the server."""
    num_prompts: int = Field(64, ge=1)
    """Number of requests."""
    max_concurrency: int | None = Field(None, ge=1)
    """Maximum number of requests open at once (closed loop). Default: no limit."""
    request_rate: float | None = Field(None, gt=0)
    """Requests per second, with Poisson arrivals (open loop). Default: all requests at once."""
    random_input_len: int = Field(128, ge=1)
    """Length of each prompt, tokens."""
    random_output_len: int = Field(128, ge=1)
    """Length of each output, tokens."""
    random_id_low: int = Field(300, ge=0)
    """Lowest token id in prompts."""
    random_id_high: int = Field(1000, ge=1)
    """Upper bound of the token ids in prompts, exclusive."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature."""
    seed: int = Field(0, ge=0)
    """Seed of prompts and arrival times."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token, so that all outputs have the same length."""
    num_warmups: int = Field(0, ge=0)
    """Number of requests before the measurement."""
    timeout: float = Field(600.0, gt=0)
    """Maximum duration of a request, seconds."""
    save_result: bool = False
    """Write the results as JSON."""
    result_filename: str = ""
    """File for the results; implies --save-result. Default: bench-TIME.json."""

    draw: bool = False
    """Draw output tokens per second and open requests over time, below the results."""

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.random_id_high <= self.random_id_low:
            yield f"--random-id-high {self.random_id_high} must be above --random-id-low {self.random_id_low}"


class ConvertConfig(BaseConfig):
    """Settings of `runahead convert`."""

    model: str = ""
    """GGUF file, or a directory or Hugging Face repository with one. Default: SmolLM2-135M-Instruct."""
    revision: str | None = None
    """Branch, tag or commit on the hub. Default: the main branch."""
    out: str = ""
    """Directory to write, empty or new. Default: one per file in the user's cache directory."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights. auto: the file's; bfloat16 for quantised weights."""


def _speculation(value: object) -> object:
    return value if value == "none" else from_json(value)


class WhatIfConfig(BaseConfig):
    """Settings that a what-if changes, under their names in `SchedulerConfig`; None: as recorded."""

    batch_queue_depth: int | None = Field(None, ge=1, le=64)
    """Steps in flight. Default: as recorded."""
    batching_policy: str | None = Field(None, min_length=1)
    """Batching policy. Default: as recorded."""
    scheduling_policy: Literal["fcfs", "priority"] | None = None
    """Order of waiting requests. Default: as recorded."""
    max_num_seqs: int | None = Field(None, ge=1, le=65536)
    """Maximum number of running requests. Default: as recorded."""
    max_num_batched_tokens: Size | None = Field(None, ge=1)
    """Maximum number of tokens in one step. Default: as recorded."""
    num_blocks: int | None = Field(None, ge=2)
    """Number of KV-cache blocks. Default: as recorded."""
    enable_prefix_caching: bool | None = None
    """Sharing of blocks by equal prefixes. Default: as recorded."""
    speculative_config: Annotated[SpeculativeConfig | Literal["none"] | None, BeforeValidator(_speculation)] = None
    """Speculative decoding, as JSON, or none. Default: as recorded."""


class ReplayConfig(WhatIfConfig):
    recording: str = ""
    """Directory of --record, or file of --record-placement."""
    incarnation: int | None = Field(None, ge=0)
    """Recording of this scheduler, the first number in the names of its files. Default: the latest."""
    draft_acceptance: float | None = Field(None, ge=0, le=1)
    """Chance of a draft to be accepted. Default: as recorded; needed if the recording has no drafts."""
    chart: str = ""
    """File for a picture of the figures of a what-if (.png, .svg); needs matplotlib. Default: none."""

    @property
    def is_what_if(self) -> bool:
        return bool(self.changes) or self.draft_acceptance is not None

    @property
    def changes(self) -> dict[str, object]:
        """Changed settings, under the names of `SchedulerConfig`."""
        given = self.model_dump(include=set(WhatIfConfig.model_fields), exclude_none=True)
        if "num_blocks" in given:
            given["num_gpu_blocks_override"] = given.pop("num_blocks")
        if given.get("speculative_config") == "none":
            given["speculative_config"] = None
        if "batch_queue_depth" in given:
            given["async_scheduling"] = None
        return given


class RunBatchConfig(ClientConfig, ServeConfig):
    """Settings of a batch, and of the services that it starts. Names are those of `vllm run-batch`."""

    input_file: str = ""
    """File with a request per line, in the format of OpenAI's batch files."""
    output_file: str = ""
    """File to write: an answer per line, in the order of the input."""
    url: str = Field("", pattern="^(https?://.*)?$")
    """URL of a running server, without /v1. Default: none; the services are started for the batch."""
    max_concurrency: int | None = Field(None, ge=1)
    """Maximum number of requests open at once. Default: --max-num-seqs."""


WITHOUT_SERVER = (
    OMITTED
    | CONNECTION
    | {"headless"}
    | (set(HttpConfig.model_fields) - {*ServiceConfig.model_fields, *ClientConfig.model_fields, "api_key_file"})
)
"""Settings of a server that has users; a batch has none of them."""
