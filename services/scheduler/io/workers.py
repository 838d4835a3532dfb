"""The worker socket: which connections belong to which worker, and who is gone. It knows messages, no rules."""

import logging
import time
from collections.abc import Iterable, Iterator

import zmq

from protocol.codec import Decoder, encode
from protocol.handshake import Hello
from protocol.membership import GroupMessage, Ping, Pong, WorkerMessage
from protocol.steps import StepMessage, StepResult
from protocol.transport import PeerGone, PeerSlow, Server
from services.scheduler.io.clock_offset import ClockOffset

log = logging.getLogger("runahead.scheduler")

PROBE_SECONDS = 1.0
"""After a connection broke workers are pinged for so long: libzmq forgets a peer a little later than it says so."""


class WorkerConnections:
    """A worker has two connections under one name: "worker", by which it is known here, and "worker-results"."""

    def __init__(self, endpoint: str) -> None:
        self._server = Server(endpoint, {"worker", "worker-results"})
        self._decoder: Decoder[WorkerMessage | StepResult] = Decoder(WorkerMessage | StepResult)
        self._by_name: dict[str, bytes] = {}
        self._results: dict[bytes, bytes] = {}
        """Worker -> its other connection."""
        self._owner: dict[bytes, bytes] = {}
        """Results connection -> worker."""
        self._clocks: dict[bytes, ClockOffset] = {}
        """By worker."""
        self._gone: list[bytes] = []
        self._probe_until = 0.0

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """`receive` has something to do when one of them is readable."""
        return self._server.socket, self._server.events

    @property
    def probing(self) -> bool:
        """Whether `take_gone` must be called again soon."""
        return time.monotonic() < self._probe_until

    def receive(self) -> Iterator[tuple[bytes, WorkerMessage | StepResult]]:
        """What has arrived, each message with the worker it is from."""
        for peer, message in self._server.messages(self._decoder):
            if isinstance(message, Hello):
                self._greet(peer, message)
            elif isinstance(message, Pong):
                if (clock := self._clocks.get(peer)) is not None:
                    clock.add(message.ping_sent, message.received, message.sent, time.monotonic())
            else:
                yield self._owner.get(peer, peer), message

    def _greet(self, peer: bytes, hello: Hello) -> None:
        if hello.role == "worker":
            if (before := self._by_name.get(hello.name)) is not None:
                self._forget(before)  # restarted, under the same name
            self._by_name[hello.name], self._clocks[peer] = peer, ClockOffset()
        elif (worker := self._by_name.get(hello.name)) is not None:
            self._results[worker], self._owner[peer] = peer, worker

    def ping(self, workers: Iterable[bytes]) -> None:
        """Start one exchange with each worker that measures how far its clock is ahead."""
        for worker in workers:
            self.send(worker, Ping(time.monotonic()))

    def clock_offset(self, worker: bytes) -> float:
        """Seconds to subtract from the worker's clock to get this process's; 0.0 if it was not measured yet."""
        return self._clocks[worker].seconds if worker in self._clocks else 0.0

    def send(self, worker: bytes, message: GroupMessage, everywhere: bool = False) -> None:
        """Who cannot be reached is found in `take_gone`. `everywhere`: on both connections."""
        frame = encode(message)
        if everywhere and (results := self._results.get(worker)) is not None:
            self._send_frame(results, worker, frame)
        self._send_frame(worker, worker, frame)

    def broadcast(self, workers: Iterable[bytes], message: StepMessage) -> bool:
        """One encoding, one send to each. False: someone is gone."""
        frame = encode(message)
        sent = [self._send_frame(worker, worker, frame) for worker in workers]  # whoever is left needs it
        return all(sent)

    def _send_frame(self, peer: bytes, worker: bytes, frame: bytes) -> bool:
        try:
            self._server.send_frame(peer, frame)
        except (PeerGone, PeerSlow) as error:
            log.debug("%s", error)
            self._forget(worker)
            return False
        return True

    def refuse(self, worker: bytes, reason: str) -> None:
        self._server.refuse(worker, reason)

    def take_gone(self, workers: Iterable[bytes]) -> list[bytes]:
        """Workers whose connection turned out to be broken since the last call; `workers` are tried if any broke."""
        if self._server.take_disconnected():
            self._probe_until = time.monotonic() + PROBE_SECONDS
        if self.probing:
            self.ping(workers)
        gone, self._gone = self._gone, []
        return gone

    def _forget(self, worker: bytes) -> None:
        if worker not in self._gone:
            self._gone.append(worker)
        self._clocks.pop(worker, None)
        self._owner.pop(self._results.pop(worker, b""), None)
        self._by_name = {name: peer for name, peer in self._by_name.items() if peer != worker}

    def close(self, linger_ms: int) -> None:
        self._server.close(linger_ms)
