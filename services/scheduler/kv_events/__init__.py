"""KV cache events in vLLM's format, for routers that place requests by their prefixes."""

from services.scheduler.kv_events.observer import KVEventObserver
from services.scheduler.kv_events.publisher import KVEventPublisher
