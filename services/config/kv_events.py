"""Settings of KV cache events; the names are those of vLLM's `--kv-events-config`."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from services.config.base import BaseConfig


class KVEventsConfig(BaseConfig):
    """Publisher of the prefix cache's changes."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None: "zmq" if events are enabled."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Endpoint of the PUB socket. It is bound if it is ipc, *, 0.0.0.0, [::] or a loopback address; to another host it
    connects, as vLLM's does."""
    replay_endpoint: str | None = None
    """Endpoint of the ROUTER socket that sends past batches again. It is always bound. None: none."""
    buffer_steps: int = Field(10_000, ge=1)
    """Batches that can be sent again."""
    hwm: int = Field(100_000, ge=1)
    """Batches that wait for one subscriber; more are dropped."""
    max_queue_size: int = Field(100_000, ge=1)
    """Batches that wait to be published; if there are more, the subscribers are sent `AllBlocksCleared`."""
    topic: str = Field("", max_length=256)

    @property
    def is_active(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.endpoint, self.replay_endpoint)))

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.publisher == "zmq" and not self.enable_kv_cache_events:
            yield '"publisher": "zmq" needs "enable_kv_cache_events": true'
        if self.replay_endpoint == self.endpoint:
            yield f'"replay_endpoint" must differ from "endpoint", {self.endpoint}'
