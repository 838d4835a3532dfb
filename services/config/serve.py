"""Settings of all services together."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, model_validator

from services.config.base import ServiceConfig, flag
from services.config.frontend import FrontendConfig
from services.config.scheduler import SchedulerConfig
from services.config.worker import WorkerConfig


class ServeConfig(WorkerConfig, SchedulerConfig, FrontendConfig):
    """Settings of all three services on one machine.

    `serve` sets the endpoints itself, so they have no flags. `--help` lists the bases from last to first.
    """

    data_parallel_size: int = Field(1, ge=1, le=64)
    """Number of engines, each with a scheduler and workers of its own. Cores and the memory for KV caches are divided
    among them."""

    prefill_engines: int = Field(0, ge=0)
    """Number of these engines that only compute long prompts (--role prefill). The others load the KV blocks from them
    and decode."""

    headless: bool = False
    """Start an engine without an HTTP server. Frontends connect to it at --client-endpoint."""

    @model_validator(mode="before")
    @classmethod
    def _with_blocks_of_vllm(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """vLLM's attention on the CPU needs blocks of a multiple of 32 tokens."""
        if values.get("backend") == "vllm" and values.get("device", "auto") in ("auto", "cpu"):
            return {"block_size": 32, **values}
        return values

    @property
    def num_workers(self) -> int:
        """Number of ranks of an engine's group. `serve` starts one worker for each."""
        tp = self.tensor_parallel_size
        return self.pipeline_parallel_size * (1 if tp == "auto" else tp)

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.tensor_parallel_size == "auto":
            yield (
                "--tensor-parallel-size auto is for runahead scheduler, where workers register by themselves; "
                "serve starts the workers and needs a number"
            )
        yield from self.refusals_of_engines()
        if self.allowed_media_domains and self.backend != "vllm":
            yield f"--allowed-media-domains: only --backend vllm reads media; --backend {self.backend} does not use it"
        if self.enable_lora and self.backend != "vllm":
            yield f"--enable-lora: only --backend vllm serves LoRA adapters; --backend {self.backend} does not use it"
        if self.prefill_engines and self.prefill_engines >= self.data_parallel_size:
            yield (
                f"--prefill-engines {self.prefill_engines} of --data-parallel-size {self.data_parallel_size} leaves no "
                "engine that decodes"
            )
        if self.prefill_engines and not (self.backend in ("native", "sim") and self.enable_prefix_caching):
            yield (
                "--prefill-engines: the others load KV blocks from them, which needs --backend native or sim, and "
                "--enable-prefix-caching"
            )
        if self.role != "both" and not self.headless:
            yield "--role is for one engine beside others; serve has --prefill-engines"
        if self.role != "both" and not (self.kv_peer_address or self.kv_offload_dir):
            yield (
                f"--role {self.role}: engines load each other's KV blocks; give --kv-peer-address, or a "
                "--kv-offload-dir that all of them use"
            )
        defaults = ServeConfig.model_construct()
        changed = {n for n in self.model_fields_set if getattr(self, n) != getattr(defaults, n, None)}
        if not self.headless:
            wrong, reason = changed & CONNECTION, "is for --headless; other services of serve need no address"
        else:
            wrong, reason = changed & FRONTEND_ONLY, "--headless has no HTTP server"
            if self.data_parallel_size > 1:
                yield "--data-parallel-size: --headless starts one engine"
            if "client_endpoint" not in changed:
                yield "--headless needs --client-endpoint, such as tcp://10.0.0.4:5601"
        if wrong:
            yield f"{flag(min(wrong))}: {reason}"
        if self.device == "cuda" and self.num_workers > 1:
            yield (
                f"--tensor-parallel-size {self.tensor_parallel_size} --pipeline-parallel-size "
                f"{self.pipeline_parallel_size}: --device cuda computes on one GPU so far; use 1 for both"
            )
        drafter = self.speculative_config
        drafts_on_gpu = drafter is not None and (self.backend, drafter.method) == ("native", "ngram")
        if self.device == "cuda" and drafter is not None and not drafts_on_gpu:
            yield (
                '--speculative-config: --device cuda computes drafts only with --backend native and "method": "ngram", '
                f'not with --backend {self.backend} and "{drafter.method}"'
            )

    def refusals_of_engines(self) -> Iterator[str]:
        """Yield the reasons why so many engines cannot share one machine."""
        for name in OF_ONE_ENGINE:
            if self.data_parallel_size > 1 and getattr(self, name):
                yield (
                    f"{flag(name)}: two engines cannot share it; use --data-parallel-size 1, or start "
                    "each engine by itself (docs/engines.md)"
                )
        if self.data_parallel_size > 1 and self.device == "cuda":
            yield f"--data-parallel-size {self.data_parallel_size}: --device cuda computes on one GPU so far; use 1"

    def service_settings(self, service: type[ServiceConfig]) -> dict[str, object]:
        """Return those settings of one service that were given explicitly."""
        return self.model_dump(include=set(service.model_fields), exclude_unset=True)


OF_ONE_ENGINE = ("record", "kv_events_config", "step_trace")
"""Settings that two engines cannot have at the same time."""
ENDPOINTS = frozenset({"worker_endpoint", "client_endpoint", "scheduler_endpoint"})
"""Settings with the endpoint of a socket between services."""
CONNECTION = frozenset({"client_endpoint", "transport_keys"})
"""Settings of an engine's connection to frontends elsewhere."""
FRONTEND_ONLY = (
    set(FrontendConfig.model_fields)
    - {"api_key"}  # the environment has it for clients, too
    - WorkerConfig.model_fields.keys()
    - SchedulerConfig.model_fields.keys()
)
OMITTED = ENDPOINTS - CONNECTION | {"engines", "control_socket", "engines_here"}
"""Settings that `serve` sets itself: its services are connected by ipc sockets in a private directory."""

SERVICES: dict[str, type[ServiceConfig]] = {
    "frontend": FrontendConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
}
"""In the order in which they are stopped: first the frontend, which has the open requests."""
