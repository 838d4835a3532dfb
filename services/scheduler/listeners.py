"""Listeners of a service's core for as long as it serves, by its settings: log, recording, KV events.

Step records are needed only while somebody subscribes to them (services.scheduler.subscriptions).
"""

import logging

from services.config import SchedulerConfig
from services.scheduler.build import CoreListener
from services.scheduler.kv_events import KVEventObserver, KVEventPublisher
from services.scheduler.recording import LiveRecording
from services.scheduler.request_log import RequestLog

log = logging.getLogger("runahead.scheduler")


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
