"""Endpoints of the publisher of KV events. tests/vllm/test_kv_events.py reads the events."""

import socket
from pathlib import Path

import pytest

from services.config import KVEventsConfig
from services.scheduler.kv_events import KVEventPublisher


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "127.0.0.1", *(["[::]"] if socket.has_dualstack_ipv6() else [])])
def test_an_endpoint_of_this_machine_is_bound(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    endpoint = f"tcp://{host}:{address[1]}"
    publisher = KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint))
    try:
        socket.create_connection(address, timeout=5).close()
    finally:
        publisher.close()


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
