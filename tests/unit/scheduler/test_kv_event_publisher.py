"""KV events, their publisher and its endpoints. tests/vllm/test_kv_events.py reads those of an engine."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from protocol.lora import LoRAAdapter
from services.config import KVEventsConfig
from services.scheduler.core import observer
from services.scheduler.core.limits import Limits
from services.scheduler.kv_events import KVEventObserver, KVEventPublisher
from services.scheduler.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from services.scheduler.kv_events.publisher import END_OF_REPLAY
from tests.waiting import wait_until

ADAPTER = LoRAAdapter("french", "/french", "0" * 14 + "6" + "f" * 49)
TOKENS = np.arange(8, dtype=np.int32)


def cached(parent: bytes | None, salt: str, lora: LoRAAdapter | None, *contents: bytes) -> observer.BlocksCached:
    return observer.BlocksCached((b"1", b"2"), parent, TOKENS, 4, salt, lora, contents)


def stored(parent: bytes | None, lora_id: int | None, lora_name: str | None, *keys: tuple[str, ...] | None) -> object:
    return BlockStored([b"1", b"2"], parent, [*range(8)], 4, lora_id, "GPU", lora_name, [*keys], 0)


@pytest.mark.parametrize(
    ("event", "published"),
    [
        (cached(None, "", None), stored(None, None, None, None, None)),
        (cached(None, "s", None), stored(None, None, None, ("s",), None)),
        (cached(b"0", "s", None), stored(b"0", None, None, None, None)),
        (cached(None, "s", ADAPTER), stored(None, 7, "french", ("french", "s"), ("french",))),
        (cached(None, "s", None, b"image", b"other"), stored(None, None, None, ("s", "image"), ("other",))),
        (observer.BlocksEvicted((b"1",)), BlockRemoved([b"1"], "GPU", 0)),
        (observer.TierChanged("host", (b"1",), ()), BlockStored([b"1"], None, [], 0, None, "CPU", None)),
        (observer.TierChanged("disk", (), (b"1",)), BlockRemoved([b"1"], "STORAGE")),
        (observer.PrefixCacheReset(False), AllBlocksCleared()),
        (observer.EpochEnded(1), AllBlocksCleared()),
        (observer.AllRequestsFailed(""), AllBlocksCleared()),
        (observer.CoreRestarted(1, Limits(4, 64, 256, 32, 16), 1, 0, b""), AllBlocksCleared()),
    ],
)
def test_changes_of_the_cache_are_published_once(
    event: observer.Event, published: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[KVEventBatch] = []
    monkeypatch.setattr(KVEventPublisher, "publish", lambda _, batch: batches.append(batch))
    listener = KVEventObserver(object.__new__(KVEventPublisher))
    listener.observe(event)
    for _ in range(2):
        listener.on_turn(None)
    assert [batch.events for batch in batches] == [[published]]


@contextmanager
def publishing(directory: Path, **settings: int) -> Iterator[tuple[KVEventPublisher, "zmq.Socket[bytes]"]]:
    """A publisher, and a socket for its replays."""
    names = {"endpoint": f"ipc://{directory}/kv", "replay_endpoint": f"ipc://{directory}/replays"}
    publisher = KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, topic="t", **names, **settings))
    try:
        with zmq.Context.instance().socket(zmq.DEALER) as replays:
            replays.linger, replays.rcvtimeo = 0, 30_000
            replays.connect(names["replay_endpoint"])
            yield publisher, replays
    finally:
        publisher.close()


def replayed(replays: "zmq.Socket[bytes]", first: int = 0) -> list[KVEventBatch]:
    replays.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while (frames := replays.recv_multipart())[2] != END_OF_REPLAY:
        assert frames[:2] == [b"", b"t"]
        found.append(msgspec.msgpack.decode(frames[3], type=KVEventBatch))
    return found


def test_past_batches_are_sent_again_and_invalid_requests_have_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with publishing(tmp_path, buffer_steps=3) as (publisher, replays):
        for number in range(5):
            publisher.publish(KVEventBatch(float(number), [AllBlocksCleared()], 0))
        for invalid in ((b"",), (b"", b"short"), (b"", bytes(8), bytes(8))):
            replays.send_multipart(invalid)
        wait_until(lambda: [batch.ts for batch in replayed(replays)] == [2.0, 3.0, 4.0], "the last three are sent")
        assert [batch.ts for batch in replayed(replays, 3)] == [3.0, 4.0]
    assert caplog.text.count("an invalid request for a replay") == 3


def test_subscribers_are_sent_that_all_blocks_are_gone_after_dropped_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last, found = 5_000, list[KVEventBatch]()
    with publishing(tmp_path, max_queue_size=2) as (publisher, replays):
        for number in range(last):
            publisher.publish(KVEventBatch(float(number), [BlockRemoved([b"1"], "GPU", 0)], 0))
        while not found or found[-1].ts != last:
            publisher.publish(KVEventBatch(float(last), [BlockRemoved([b"1"], "GPU", 0)], 0))
            found = replayed(replays)
    after_gaps = [batch for before, batch in pairwise(found) if batch.ts > before.ts + 1]
    cleared = [batch for batch in found if batch.events == [AllBlocksCleared()]]
    assert after_gaps
    assert all(batch in cleared for batch in after_gaps)
    assert caplog.text.count("KV events are dropped") == len(cleared)


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
