"""KV cache events of a real scheduler, read with vLLM's own types."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from protocol.sampling import SamplingParams
from tests.integration.scheduler.engine import PATIENCE, engine

BLOCK = 16
SIM = {"backend": "sim", "sim_step_ms": 0.0, "sim_vocab_size": 1000, "kv_offload_bytes": 6 * 8 * BLOCK}
"""With a tier for six blocks."""
TOPIC = "kv@test"


class EventSubscriber:
    """A subscriber as vLLM's example: a SUB socket and a REQ-like socket for replays."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._events = zmq.Context.instance().socket(zmq.SUB)
        self._events.connect(endpoint)
        self._events.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self._replays = zmq.Context.instance().socket(zmq.DEALER)
        self._replays.connect(replay_endpoint)
        self.batches: dict[int, KVEventBatch] = {}

    def has_events(self) -> bool:
        return bool(self._events.poll(50))

    def receive(self, until: type, medium: str = "GPU") -> None:
        """Receive batches until one has an event of a type, about a medium unless it is about all."""
        deadline = time.monotonic() + PATIENCE
        while not any(
            isinstance(event, until) and getattr(event, "medium", medium) == medium
            for batch in self.batches.values()
            for event in batch.events
        ):
            assert time.monotonic() < deadline, self.batches
            if self._events.poll(1000):
                topic, number, payload = self._events.recv_multipart()
                assert topic == TOPIC.encode()
                self.batches[int.from_bytes(number, "big")] = self._decoder.decode(payload)

    def replay(self, first: int) -> dict[int, KVEventBatch]:
        """Return the batches from a sequence number on."""
        self._replays.send_multipart((b"", first.to_bytes(8, "big")))
        found = {}
        while True:
            assert self._replays.poll(1000 * PATIENCE)
            empty, _, number, payload = self._replays.recv_multipart()
            assert empty == b""
            if number == ZmqEventPublisher.END_SEQ:
                return found
            found[int.from_bytes(number, "big")] = self._decoder.decode(payload)

    def close(self) -> None:
        self._events.close(0)
        self._replays.close(0)


@pytest.fixture
def subscriber(tmp_path: Path) -> Iterator[EventSubscriber]:
    found = EventSubscriber(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays")
    yield found
    found.close()


def test_vllm_types_decode_stored_removed_and_cleared_blocks_and_replays(
    tmp_path: Path, subscriber: EventSubscriber
) -> None:
    kv_events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replays",
        "topic": TOPIC,
        "buffer_steps": 100,
    }
    scheduler = {"kv_events_config": kv_events, "num_gpu_blocks_override": 12, "max_model_len": 128}
    with engine(tmp_path, scheduler, SIM) as running:
        client = running.connect()
        prompt = [*range(3 * BLOCK + 3)]
        number = 0
        while not subscriber.batches:  # the subscription takes effect in the background
            client.generate(number, [number, *prompt], SamplingParams(4, temperature=0.0))
            client.wait_finished(number)
            number += 1
            if subscriber.has_events():
                subscriber.receive(BlockStored)
        subscriber.receive(BlockStored)
        for other in range(number, number + 12):
            client.generate(other, [500 + other, *prompt], SamplingParams(4, temperature=0.0))
            client.wait_finished(other)
        subscriber.receive(BlockRemoved)
        subscriber.receive(BlockStored, "CPU")
        subscriber.receive(BlockRemoved, "CPU")
        running.worker.kill()  # the KV cache is lost
        subscriber.receive(AllBlocksCleared)
        everything = subscriber.replay(0)
    assert [*everything] == [*range(len(everything))]
    assert everything.items() >= subscriber.batches.items()
    check(everything, prompt)
    numbers = sorted(subscriber.batches)
    assert numbers == [*range(numbers[0], numbers[-1] + 1)]


def check(batches: dict[int, KVEventBatch], prompt: list[int]) -> None:
    """Check that the events tell one state of a cache: chains of parents, and tokens of the prompts."""
    cached: set[bytes] = set()
    seen, tier = set[bytes](), set[bytes]()
    for batch in batches.values():
        assert batch.data_parallel_rank == 0
        assert batch.ts <= time.time()
        for event in batch.events:
            match event:
                case BlockStored(medium="CPU"):
                    assert set(event.block_hashes) <= seen, "the cache had them before"
                    assert (event.token_ids, event.parent_block_hash, event.extra_keys) == ([], None, None)
                    tier |= set(event.block_hashes)
                case BlockRemoved(medium="CPU"):
                    assert set(event.block_hashes) <= tier
                    tier -= set(event.block_hashes)
                case BlockStored():
                    assert (event.block_size, event.medium, event.lora_id) == (BLOCK, "GPU", None)
                    assert len(event.token_ids) == BLOCK * len(event.block_hashes)
                    assert event.parent_block_hash is None or event.parent_block_hash in cached
                    assert event.extra_keys == [None] * len(event.block_hashes)
                    if event.parent_block_hash is None:
                        assert event.token_ids[1:BLOCK] == prompt[: BLOCK - 1]
                    cached |= set(event.block_hashes)
                    seen |= cached
                case BlockRemoved():
                    assert set(event.block_hashes) <= cached
                    cached -= set(event.block_hashes)
                case AllBlocksCleared():
                    cached.clear()
    assert not cached
    assert 0 < len(tier) <= 6
