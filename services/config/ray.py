"""Settings of an application on a Ray cluster."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from services.config.serve import CONNECTION, OMITTED, ServeConfig


class RayConfig(ServeConfig):
    """Settings of engines and frontends that Ray places."""

    port: int = Field(8001, ge=1, le=65535)
    """Port of each frontend itself, beside that of Ray Serve's proxy. A node has at most one frontend."""
    threads: int = Field(1, ge=1)
    """Number of compute threads of a rank, which are CPUs that Ray reserves for it."""
    data_parallel_size: int = Field(1, ge=1, le=64)
    """Number of engines, each with a scheduler and workers of its own."""
    max_data_parallel_size: int | None = Field(None, ge=1, le=64)
    """Most engines that Ray Serve may start. If it is more than --data-parallel-size, their number follows the time
    that a new request waits. Default: --data-parallel-size."""
    target_queue_seconds: float = Field(2.0, gt=0)
    """Expected seconds until the first step of a new request above which there are too few engines."""
    upscale_delay_s: float = Field(30.0, ge=0)
    """Seconds for which there must be too few engines before one is started."""
    downscale_delay_s: float = Field(600.0, ge=0)
    """Seconds for which there must be too many engines before one is drained."""
    api_server_count: int = Field(1, ge=1, le=100)
    """Number of frontends, each on a node of its own; at most one per node."""
    placement_group_strategy: Literal["PACK", "STRICT_PACK", "SPREAD"] = "PACK"
    """Nodes of an engine: each tensor-parallel group on one node, and as few nodes as possible (PACK); all on one node
    (STRICT_PACK); or every rank on another node, as far as there are enough (SPREAD)."""
    wait_for_resources: bool = False
    """Wait for nodes that an autoscaler of the cluster adds, instead of failing, if those that it has now have too few
    CPUs or GPUs."""
    drain_timeout_seconds: float = Field(60.0, ge=0)
    """Seconds that the streams of an engine or a frontend that Ray Serve stops have to move or end."""

    @property
    def max_engines(self) -> int:
        return self.max_data_parallel_size or self.data_parallel_size

    def refusals_of_engines(self) -> Iterator[str]:
        """Engines are on machines and GPUs of their own."""
        if self.max_engines < self.data_parallel_size:
            yield (
                f"--max-data-parallel-size {self.max_data_parallel_size} is less than --data-parallel-size "
                f"{self.data_parallel_size}"
            )


class RayCommandConfig(RayConfig):
    address: str = "auto"
    """Address of the cluster, such as 10.0.0.4:6379. auto: that of this node."""
    name: str = Field("default", pattern=r"^[^:\s]+$")
    """Name of the application in Ray Serve."""
    route_prefix: str = Field("/", pattern=r"^/")
    """Path below which Ray Serve's proxy serves the API."""


OF_RAY = OMITTED | {
    *CONNECTION,
    "headless",
    "host_ip",
    "prefill_engines",
    "record",
    "record_max_bytes",
    "record_tokens",
    "role",
    "step_trace",
    "kv_events_config",
    "uds",
    "insecure_transport",
}
"""Settings that an application on Ray does not have. Its engines are all equal, so they have no roles."""
WHY_NOT_OF_RAY = (
    "an application on Ray does not have this setting: Ray places the services, they make their keys themselves, and "
    "engines that come and go cannot share a file"
)
