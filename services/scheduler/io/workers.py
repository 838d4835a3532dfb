"""The worker socket: which connections belong to which worker, and which workers are gone. It has no rules."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator

from protocol.codec import Decoder, ProtocolError, encode
from protocol.handshake import Hello
from protocol.membership import GroupMessage, Ping, Pong, WorkerMessage
from protocol.security import LOCAL, Security
from protocol.steps import LoadBlocks, StepMessage, StepResult
from protocol.transport import PeerGone, PeerSlow, Server

log = logging.getLogger("runahead.scheduler")

WINDOW = 16
"""Exchanges that count. One exchange a second keeps the error of drifting clocks below a millisecond."""


class ClockOffset:
    """Offset of a peer's monotonic clock from ours, measured on the connection.

    Each exchange of a `Ping` and its `Pong` gives an estimate whose error is at most half its round trip. Of the last
    exchanges the one with the shortest round trip counts (NTP's clock filter, RFC 5905 section 10). On one machine all
    processes share the clock, and the offset is within microseconds of zero.
    """

    def __init__(self) -> None:
        self._exchanges: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """(round trip, offset), seconds"""
        self.seconds = 0.0
        """Seconds to subtract from the peer's clock to get ours; 0.0 before the first exchange."""

    def add(self, sent: float, received_there: float, sent_there: float, received: float) -> None:
        """One exchange, in order of time: seconds on our clock, twice on the peer's, and on ours again."""
        round_trip = (received - sent) - (sent_there - received_there)
        offset = ((received_there - sent) + (sent_there - received)) / 2
        self._exchanges.append((max(0.0, round_trip), offset))
        self.seconds = min(self._exchanges)[1]


RESULTS = "worker-results"
"""Role of a worker's connection for results."""


class WorkerConnections:
    """A worker has two connections under one name: "worker", which identifies it, and "worker-results".

    A name belongs to the connections that came first, while they live. Results are accepted on the second one alone
    (identity, docs/invariants.md).
    """

    def __init__(self, endpoint: str, security: Security = LOCAL) -> None:
        self.server = Server(endpoint, {"worker", RESULTS}, security)
        self._decoder: Decoder[WorkerMessage | StepResult] = Decoder(WorkerMessage | StepResult)
        self.by_name: dict[str, bytes] = {}
        """Workers that are not known to be gone."""
        self._results: dict[bytes, bytes] = {}
        """Worker -> its other connection."""
        self._owner: dict[bytes, bytes] = {}
        """Results connection -> worker."""
        self._clocks: dict[bytes, ClockOffset] = {}
        """By worker."""
        self._gone: list[bytes] = []

    def receive(self) -> Iterator[tuple[bytes, WorkerMessage | StepResult]]:
        """Yield what has arrived, each message with its worker."""
        for peer, message in self.server.messages(self._decoder):
            if isinstance(message, Hello):
                self._greet(peer, message)
            elif isinstance(message, Pong):
                if (clock := self._clocks.get(peer)) is not None:
                    clock.add(message.ping_sent, message.received, message.sent, time.monotonic())
                    yield peer, message
            elif (worker := self._sender(peer, message)) is not None:
                yield worker, message

    def _greet(self, peer: bytes, hello: Hello) -> None:
        worker = self.by_name.get(hello.name)
        if hello.role == RESULTS:
            if worker is None:  # it was lost meanwhile, and connects again
                return
            if worker not in self._results:
                self._results[worker], self._owner[peer] = peer, worker
                return
        elif worker is None:
            self.by_name[hello.name], self._clocks[peer] = peer, ClockOffset()
            return
        self.server.refuse(peer, f"the name {hello.name!r} belongs to another connection")

    def _sender(self, peer: bytes, message: WorkerMessage | StepResult) -> bytes | None:
        """Return the worker that sent a message; None: the message is dropped."""
        if self.server.peers[peer].role == RESULTS:
            return self._owner.get(peer)
        if isinstance(message, StepResult):
            self.server.expel(peer, ProtocolError("results belong on the connection for results"))
            return None
        return peer

    def beat(self, number: int, ranks: Iterable[bytes]) -> None:
        """Send each worker a sign of life, on the connection that a hanging step does not block; and `ranks` on their
        connection for plans, too. The answers measure how far their clocks are ahead."""
        ping = encode(Ping(time.monotonic(), number))
        for worker, results in list(self._results.items()):
            self._send_frame(results, worker, ping)
        for worker in ranks:
            self._send_frame(worker, worker, ping)

    def clock_offset(self, worker: bytes) -> float:
        """Seconds to subtract from the worker's clock to get this process's; 0.0 if it was not measured yet."""
        return self._clocks[worker].seconds if worker in self._clocks else 0.0

    def send(self, worker: bytes, message: GroupMessage | LoadBlocks, everywhere: bool = False) -> None:
        """A worker that cannot be reached is in the next `take_gone`. `everywhere`: on both connections."""
        frame = encode(message)
        if everywhere and (results := self._results.get(worker)) is not None:
            self._send_frame(results, worker, frame)
        self._send_frame(worker, worker, frame)

    def broadcast(self, workers: Iterable[bytes], message: StepMessage) -> bool:
        """Encode once, send to each. False: a worker is gone; the others have been sent the message."""
        frame = encode(message)
        sent = [self._send_frame(worker, worker, frame) for worker in workers]
        return all(sent)

    def _send_frame(self, peer: bytes, worker: bytes, frame: bytes) -> bool:
        try:
            self.server.send_frame(peer, frame)
        except (PeerGone, PeerSlow) as error:
            log.debug("%s", error)
            self._lose(worker)
            return False
        return True

    def refuse(self, worker: bytes, reason: str) -> None:
        """Turn a worker away for good."""
        self.server.refuse(worker, reason)
        self._drop(worker)

    def take_gone(self) -> list[bytes]:
        """Return the workers that lost a connection, or were expelled, since the last call."""
        for peer in self.server.take_lost():
            self._lose(self._owner.get(peer, peer))
        gone, self._gone = self._gone, []
        return gone

    def _lose(self, worker: bytes) -> None:
        if worker not in self._gone:
            self._gone.append(worker)
        self._drop(worker)

    def _drop(self, worker: bytes) -> None:
        """Remove all that is known of a worker."""
        self._clocks.pop(worker, None)
        self._owner.pop(self._results.pop(worker, b""), None)
        self.by_name = {name: peer for name, peer in self.by_name.items() if peer != worker}

    def close(self, linger_ms: int) -> None:
        self.server.close(linger_ms)
