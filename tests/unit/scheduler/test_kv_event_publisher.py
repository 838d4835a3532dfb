"""Endpoints of the publisher of KV events. tests/vllm/test_kv_events.py reads the events."""

from pathlib import Path

import pytest

from services.config import KVEventsConfig
from services.scheduler.kv_events import KVEventPublisher


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_an_endpoint_that_another_service_uses_is_refused(tmp_path: Path, key: str) -> None:
    """libzmq would replace the file of an ipc socket."""
    taken = f"ipc://{tmp_path}/kv"
    first = KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=taken))
    settings = {"endpoint": f"ipc://{tmp_path}/other", key: taken}
    try:
        with pytest.raises(OSError, match=rf"--kv-events-config: cannot use {taken}: .*another service"):
            KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, **settings))
    finally:
        first.close()
