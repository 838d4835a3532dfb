"""Listeners of a service's core for as long as it serves, by its settings: log, recording, KV events.

Step records are needed only while somebody subscribes to them (services.scheduler.subscriptions).
"""

import logging
from typing import Protocol

from services.config import SchedulerConfig
from services.scheduler.build import CoreStart
from services.scheduler.core.engine import EngineCore
from services.scheduler.kv_events import KVEventObserver, KVEventPublisher
from services.scheduler.recording import LiveRecording
from services.scheduler.request_log import RequestLog

log = logging.getLogger("runahead.scheduler")


class CoreListener(Protocol):
    """Attaches observers to the core, and owns what they write to."""

    def attach(self, core: EngineCore, start: CoreStart) -> None:
        """The core is built. It has processed nothing yet."""
        ...

    def on_turn(self, core: EngineCore) -> None:
        """The service has handled everything that arrived and sent what followed from it; an epoch is in effect. Only
        here a listener may call the core."""
        ...

    def close(self) -> None:
        """Write or publish what is left."""
        ...


def make_listeners(config: SchedulerConfig, incarnation: int) -> tuple[CoreListener, ...]:
    """Raises: OSError, if a directory or an endpoint cannot be used."""
    listeners: list[CoreListener] = []
    if log.isEnabledFor(logging.DEBUG):
        listeners.append(RequestLog())
    if config.record:
        listeners.append(LiveRecording(config, incarnation, config.record))
    if config.kv_events_config is not None and config.kv_events_config.is_active:
        listeners.append(KVEventObserver(KVEventPublisher(config.kv_events_config)))
    return tuple(listeners)
