"""Publisher of KV cache events: a PUB socket with sequence numbers, and a ROUTER socket that sends past batches again.

Frames as vLLM's: topic, sequence number (8 bytes, big-endian), batch. A request for a replay is an empty frame and the
first sequence number; each answer is an empty frame and the three frames, the last one with sequence number -1.
"""

import contextlib
import logging
import threading
from collections import deque
from queue import Empty, Full, Queue

import msgspec
import zmq

from protocol.transport.endpoint import ipc_path, is_everywhere, is_private, prepare_path
from services.config import KVEventsConfig
from services.scheduler.kv_events.messages import AllBlocksCleared, KVEventBatch

log = logging.getLogger("runahead.scheduler.kv_events")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
POLL_SECONDS = 0.05
"""Time between two looks for requests of replays while nothing is published."""
LINGER_MS = 200
_END = object()


class KVEventPublisher:
    """`publish` never waits; a thread owns the sockets."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises: OSError, if an endpoint cannot be bound."""
        self._topic = config.topic.encode()
        self._queue: Queue[KVEventBatch | object] = Queue(config.max_queue_size)
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        self._has_dropped = False
        self._publisher = _open(zmq.PUB, config.endpoint, config.hwm, binds=_is_own(config.endpoint))
        self._replays: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            try:
                self._replays = _open(zmq.ROUTER, config.replay_endpoint, config.hwm, binds=True)
            except OSError:
                self._publisher.close(0)
                raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        """Queue a batch. If the queue is full, subscribers are sent later that all blocks are gone: what they know
        would be wrong."""
        try:
            if self._has_dropped:
                self._queue.put_nowait(KVEventBatch(batch.ts, [AllBlocksCleared()], batch.data_parallel_rank))
                self._has_dropped = False
            self._queue.put_nowait(batch)
        except Full:
            if not self._has_dropped:
                log.warning("KV events are dropped: they come faster than they can be published")
            self._has_dropped = True

    def close(self) -> None:
        """Publish what is queued, then close the sockets."""
        self._queue.put(_END)
        self._thread.join()

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        try:
            while True:
                self._answer_replays()
                with contextlib.suppress(Empty):
                    batch = self._queue.get(timeout=POLL_SECONDS)
                    if batch is _END:
                        return
                    number, payload = self._sequence.to_bytes(8, "big"), encoder.encode(batch)
                    self._sequence += 1
                    self._past.append((number, payload))
                    self._publisher.send_multipart((self._topic, number, payload))
        finally:
            self._publisher.close(LINGER_MS)
            if self._replays is not None:
                self._replays.close(LINGER_MS)

    def _answer_replays(self) -> None:
        while self._replays is not None and self._replays.poll(0):
            frames = self._replays.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                log.warning("an invalid request for a replay of KV events was dropped")
                continue
            peer, _, first = frames
            for number, payload in self._past:
                if number >= first:
                    self._replays.send_multipart((peer, b"", self._topic, number, payload))
            self._replays.send_multipart((peer, b"", b"", END_OF_REPLAY, b""))


def _is_own(endpoint: str) -> bool:
    """Return whether the endpoint is an address of this machine, or all of them."""
    return is_private(endpoint) or is_everywhere(endpoint)


def _open(kind: int, endpoint: str, hwm: int, binds: bool) -> zmq.Socket[bytes]:
    """Raises: OSError"""
    opened: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    opened.linger = 0
    opened.set_hwm(hwm)
    opened.ipv6 = "[" in endpoint
    try:
        if not binds:
            opened.connect(endpoint)
            return opened
        if (path := ipc_path(endpoint)) is not None:
            prepare_path(path)
        opened.bind(endpoint)
    except (OSError, zmq.ZMQError) as error:
        opened.close(0)
        raise OSError(error.errno, f"--kv-events-config: cannot use {endpoint}: {error.strerror}") from None
    return opened
