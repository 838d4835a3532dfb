"""A network between simulated processes, below the interface of pyzmq: contexts, sockets, their monitors, pollers.

A connection behaves as ZeroMQ's over TCP: two ordered lanes, a new routing id each time, frames that wait for a
connection, reconnection, and events when a connection is made or lost. The connections of a process are made in any
order, and one may be slower than the other. A partition holds the frames of a lane back until it heals. A reset loses
the frames on their way, and each side learns of it at another time. Beyond what TCP allows, `Noise` loses, repeats,
reorders and damages frames: nothing wrong may follow from that. A connection on which frames were lost or damaged
breaks in the end.
"""

import errno
import struct
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import zmq

from protocol.codec import encode
from protocol.kv_transfer import FetchBlocks, FetchedBlocks
from protocol.steps import ReleaseSlots
from tests.simulation.whole.hub import Hub, SimulatedProcess, Waiters

RECONNECT = 0.1
"""Seconds between two attempts of libzmq to connect."""
FORGET = 0.05
"""Maximum seconds from the event of a lost connection until its routing id is unknown."""
NOTICED = (0.0, 0.05, 1.0)
"""Seconds until a side learns of a reset; one of them is drawn for each."""
FREE_PORTS = 10_000
"""The first one that is given to a socket without a port."""
_AGAIN = zmq.Again()
"""Raised whenever nothing has arrived: to make one takes longer than all else of a call."""
_UNNUMBERED = (
    encode(ReleaseSlots(0, b""))[:8],
    encode(FetchBlocks(b"", b""))[:7],
    encode(FetchedBlocks(0, memoryview(b"")))[:9],
)
"""Beginnings of the messages whose repetition and reordering only TCP prevents: they have no number."""
_FIN = None
"""The end of a connection, in a lane."""


@dataclass
class Noise:
    """Probabilities per frame."""

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    corruption: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.loss or self.duplication or self.reordering or self.corruption)


@dataclass(frozen=True)
class Speeds:
    """Seconds; one value of each is drawn."""

    latencies: tuple[float, ...] = (0.0002, 0.0005, 0.002)
    """From a socket to the other, for each frame."""
    lags: tuple[float, ...] = (0.0,)
    """In addition, for all frames of a lane."""
    connects: tuple[float, ...] = (0.001,)
    """Until a connection is made."""


class SimulatedNetwork:
    def __init__(self, hub: Hub, speeds: Speeds) -> None:
        self.hub, self.rng = hub, hub.rng
        self.speeds = speeds
        self.noise = Noise()
        self.happened = Counter[str]()
        self.bound: dict[str, RouterSocket] = {}
        """The socket that new connections to an endpoint reach."""
        self.sockets: dict[int, SimulatedSocket] = {}
        """By file descriptor."""
        self.connecting: list[DealerSocket] = []
        """Sockets without a connection."""
        self.lanes: list[Lane] = []
        self._blocked: set[tuple[str, str]] = set()
        """Pairs of process names (sender, receiver) whose frames are held back."""
        self._ids = 0

    def context(self) -> "SimulatedContext":
        """`zmq.Context.instance` of the process that runs."""
        assert self.hub.process is not None
        return SimulatedContext(self, self.hub.process)

    def poller(self) -> "SimulatedPoller":
        return SimulatedPoller(self)

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    # -- partitions ----------------------------------------------------------------------------------------------

    def is_blocked(self, sender: SimulatedProcess, receiver: SimulatedProcess) -> bool:
        return (sender.name, receiver.name) in self._blocked

    def partition(self, sender: str, receiver: str) -> None:
        """Hold back what one process sends to another."""
        self.hub.log("partition", sender, "->", receiver)
        self._blocked.add((sender, receiver))

    def calm(self) -> None:
        """End the noise, and break the connections that have lost frames."""
        self.noise = Noise()
        for connection in [c for router in self.bound.values() for c in router.connections.values()]:
            if connection.up.is_lossy or connection.down.is_lossy:
                self.hub.log("breaks", connection.up)
                connection.breaks()

    def reset(self, process: SimulatedProcess) -> None:
        """Reset one connection of a process, if it has one."""
        connections = [
            connection
            for router in self.bound.values()
            for connection in router.connections.values()
            if connection.dealer.process is process and not connection.up.closed
        ]
        if connections:
            self.rng.choice(connections).reset(self.rng.choice(NOTICED), self.rng.choice(NOTICED))

    def heal(self) -> None:
        """End all partitions."""
        if self._blocked or any(lane.is_held for lane in self.lanes):
            self.hub.log("partitions heal")
        self._blocked.clear()
        self.lanes = [lane for lane in self.lanes if lane.release()]


class Lane:
    """One direction of a connection."""

    def __init__(
        self,
        network: SimulatedNetwork,
        sender: SimulatedProcess,
        receiver: SimulatedProcess,
        arrive: Callable[[bytes | None], None],
    ) -> None:
        self._network, self._sender, self._receiver, self._arrive = network, sender, receiver, arrive
        self._lag = network.rng.choice(network.speeds.lags)
        self._last = 0.0
        """When the last frame in order arrives."""
        self._held: deque[bytes | None] = deque()
        self.closed = False
        self.is_lossy = False
        """A frame was lost or damaged."""
        self.is_held = False
        """True: all frames are held back, as in a partition of this lane alone."""
        network.lanes.append(self)

    def send(self, frame: bytes | None) -> None:
        network, rng, noise, happened = (self._network, self._network.rng, self._network.noise, self._network.happened)
        if frame and noise and not frame.startswith(_UNNUMBERED):
            if rng.random() < noise.loss:
                happened["frames lost"] += 1
                network.hub.log("lost", self, _head(frame))
                self.is_lossy = True
                return
            if rng.random() < noise.corruption:
                happened["frames corrupted"] += 1
                network.hub.log("corrupted", self, _head(frame))
                self.is_lossy = True
                frame = _damaged(frame, rng.randrange(len(frame)))
            if rng.random() < noise.duplication:
                happened["frames repeated"] += 1
                network.hub.log("repeated", self, _head(frame))
                self._later(frame, rng.uniform(0.0, 0.5))
            if rng.random() < noise.reordering:
                happened["frames reordered"] += 1
                network.hub.log("reordered", self, _head(frame))
                self._later(frame, rng.uniform(0.0, 0.5))
                return
        hub = network.hub
        self._last = max(self._last, hub.now + self._lag + rng.choice(network.speeds.latencies))
        self._later(frame, self._last - hub.now)

    def _later(self, frame: bytes | None, seconds: float) -> None:
        self._network.hub.after(seconds, partial(self._on_arrival, frame))

    def _on_arrival(self, frame: bytes | None) -> None:
        if self._held or self.is_held or self._network.is_blocked(self._sender, self._receiver):
            self._held.append(frame)
        elif not self.closed:
            if self._network.hub.tracing and frame:
                self._network.hub.log(self, _head(frame))
            self._arrive(frame)

    def release(self) -> bool:
        """A partition has healed: deliver what was held back. Return whether the lane is still used."""
        self.is_held = False
        held, self._held = self._held, deque()
        for frame in held:
            self._on_arrival(frame)
        return not self.closed

    def __str__(self) -> str:
        return f"{self._sender.name}->{self._receiver.name}"


def _damaged(frame: bytes, at: int) -> bytes:
    """Return a frame that no decoder accepts. What still decodes would have to be found by TCP or by CURVE."""
    return b"\xc1" + frame[at:]


def _head(frame: bytes) -> str:
    """Return the beginning of a frame, for the event log."""
    return f"{len(frame)} bytes {frame[:24]!r}"


class SimulatedFrame(NamedTuple):
    bytes: bytes
    more: bool


class SimulatedSocket:
    """Options and arrivals of both kinds of sockets, and of monitors."""

    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess) -> None:
        self.network, self.process = network, process
        self.fd = network.next_id()
        network.sockets[self.fd] = self
        self.linger = self.sndhwm = self.rcvhwm = self.maxmsgsize = 0
        self.ipv6 = False
        self.closed = False
        self.inbox: deque[tuple[bytes, ...]] = deque()
        self.waiters = Waiters()
        self.listener: Callable[[], None] | None = None
        """Called when something arrives: by an event loop that watches `fd`."""
        self.monitor: SimulatedSocket | None = None
        self.endpoint = ""

    def setsockopt(self, option: int, value: object) -> None:
        """Limits of queues and of silence: no run comes near them."""

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self.inbox else 0

    def getsockopt_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        return self.endpoint

    def get_monitor_socket(self, events: int) -> "SimulatedSocket":
        self.monitor = SimulatedSocket(self.network, self.process)
        return self.monitor

    def disable_monitor(self) -> None:
        self.monitor = None

    def tell(self, event: int) -> None:
        """Add an event to the monitor."""
        if self.monitor is not None:
            self.monitor.arrive((struct.pack("=Hi", event, 0), b""))

    def arrive(self, parts: tuple[bytes, ...]) -> None:
        if self.closed or not self.process.alive:
            return
        self.inbox.append(parts)
        self.waiters.wake()
        if self.listener is not None:
            self.process.do(self.listener)

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self.inbox:
            raise _AGAIN.with_traceback(None)
        return list(self.inbox.popleft())

    def close(self, linger: int | None = None) -> None:
        self.closed = True
        self.network.sockets.pop(self.fd, None)


class SimulatedConnection:
    """One life of a connection between two sockets."""

    def __init__(self, dealer: "DealerSocket", router: "RouterSocket") -> None:
        network = dealer.network
        self.dealer, self.router = dealer, router
        self.identity = b"\0" + struct.pack(">I", network.next_id())
        self.up = Lane(network, dealer.process, router.process, self._at_router)
        self.down = Lane(network, router.process, dealer.process, self._at_dealer)

    def breaks(self) -> None:
        """Both sides lose it."""
        self._at_router(_FIN)
        self._at_dealer(_FIN)

    def reset(self, dealer_seconds: float, router_seconds: float) -> None:
        """Nothing arrives any more, and each side notices it some time later."""
        self.up.closed = self.down.closed = True
        hub = self.router.network.hub
        hub.log("reset", self.up)
        hub.after(dealer_seconds, partial(self.dealer.lose, self))
        hub.after(router_seconds, partial(self.router.lose, self))

    def _at_router(self, frame: bytes | None) -> None:
        if frame is not _FIN:
            self.router.arrive((self.identity, frame))
        else:
            self.up.closed = self.down.closed = True
            self.router.lose(self)

    def _at_dealer(self, frame: bytes | None) -> None:
        if frame is not _FIN:
            self.dealer.arrive((frame,))
        else:
            self.up.closed = self.down.closed = True
            self.dealer.lose(self)


class DealerSocket(SimulatedSocket):
    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess) -> None:
        super().__init__(network, process)
        self.connection: SimulatedConnection | None = None
        self._unsent: deque[bytes] = deque()
        process.on_end.append(self.close)

    def connect(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.network.connecting.append(self)
        self._connect_soon(self.network.rng.choice(self.network.speeds.connects))

    def _connect_soon(self, seconds: float) -> None:
        self.network.hub.after(seconds, self._connect)

    def _connect(self) -> None:
        if self.closed or self.connection is not None:
            return
        router, ours = self.network.bound.get(self.endpoint), self.process
        if (
            router is None
            or ours.stopped
            or router.process.stopped
            or self.network.is_blocked(ours, router.process)
            or self.network.is_blocked(router.process, ours)
        ):
            self._connect_soon(RECONNECT)
            return
        self.network.connecting.remove(self)
        if any(other.process is ours and other.fd < self.fd for other in self.network.connecting):
            self.network.happened["connections made in another order"] += 1
        self.connection = connection = SimulatedConnection(self, router)
        router.connections[connection.identity] = connection
        self.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        router.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        while self._unsent:
            connection.up.send(self._unsent.popleft())

    def lose(self, connection: SimulatedConnection) -> None:
        """The other side has closed the connection."""
        if self.connection is connection and not self.closed:
            self.connection = None
            self.network.connecting.append(self)
            self.tell(zmq.EVENT_DISCONNECTED)
            self._connect_soon(RECONNECT)

    def send(self, frame: bytes, flags: int = 0) -> None:
        if self.closed and self.process.alive:
            raise zmq.ZMQError(errno.ENOTSOCK)
        if self.closed:
            return
        if self.connection is None:
            self._unsent.append(frame)
        else:
            self.connection.up.send(frame)

    def recv(self, flags: int = 0) -> bytes:
        return self.recv_multipart(flags)[0]

    def close(self, linger: int | None = None) -> None:
        if not self.closed:
            super().close()
            if self.connection is not None:
                self.connection.up.send(_FIN)
                self.connection.down.closed = True
            elif self in self.network.connecting:
                self.network.connecting.remove(self)


class RouterSocket(SimulatedSocket):
    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess) -> None:
        super().__init__(network, process)
        self.connections: dict[bytes, SimulatedConnection] = {}
        self._unread: list[bytes] = []
        """Parts of a message of which the first was read."""
        process.on_end.append(self.close)

    def bind(self, endpoint: str) -> None:
        """A newer socket on the same endpoint gets the new connections, as behind a name that moves."""
        self.endpoint = f"{endpoint[:-1]}{FREE_PORTS + self.fd}" if endpoint.endswith(":0") else endpoint
        self.network.bound[self.endpoint] = self

    def lose(self, connection: SimulatedConnection) -> None:
        """The other side has closed the connection."""
        self.tell(zmq.EVENT_DISCONNECTED)
        forget = partial(self.connections.pop, connection.identity, None)
        self.network.hub.after(self.network.rng.uniform(0.0, FORGET), forget)

    def recv(self, flags: int, copy: bool) -> SimulatedFrame:
        self._unread = self._unread or self.recv_multipart(flags)
        return SimulatedFrame(self._unread.pop(0), more=bool(self._unread))

    def send(self, part: bytes, flags: int) -> None:
        """The first part is the identity of a connection."""
        if not flags & zmq.SNDMORE:
            self._receiver.down.send(part)
        elif part in self.connections:
            self._receiver = self.connections[part]
        else:
            raise zmq.ZMQError(errno.EHOSTUNREACH)

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        super().close()
        if self.network.bound.get(self.endpoint) is self:
            del self.network.bound[self.endpoint]
        for connection in self.connections.values():
            connection.down.send(_FIN)
            connection.up.closed = True


class SimulatedContext:
    def __init__(self, network: SimulatedNetwork, process: SimulatedProcess) -> None:
        self._network, self._process = network, process

    def socket(self, kind: int) -> SimulatedSocket:
        kinds = {zmq.ROUTER: RouterSocket, zmq.DEALER: DealerSocket}
        return kinds[kind](self._network, self._process)


class Wakeup:
    """A pipe to oneself: something without a socket that a poller can watch."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.fd = network.next_id()
        self.waiters = Waiters()
        self.inbox: deque[bytes] = deque()
        network.sockets[self.fd] = self

    def fileno(self) -> int:
        return self.fd

    def put(self, data: bytes = b"\0") -> None:
        self.inbox.append(data)
        self.waiters.wake()

    def recv(self, size: int) -> bytes:
        return self.inbox.popleft()


Source = SimulatedSocket | Wakeup


class SimulatedPoller:
    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network
        self._sources: list[Source] = []

    def register(self, source: Source | int, flags: int) -> None:
        assert flags == zmq.POLLIN
        self._sources.append(self._network.sockets[source] if isinstance(source, int) else source)

    def poll(self, milliseconds: float | None = None) -> list[tuple[Source | int, int]]:
        if not (ready := self._ready()) and milliseconds != 0:
            seconds = None if milliseconds is None else milliseconds / 1000
            self._network.hub.wait([source.waiters for source in self._sources], seconds)
            ready = self._ready()
        return ready

    def _ready(self) -> list[tuple[Source | int, int]]:
        return [
            (source.fd if isinstance(source, Wakeup) else source, zmq.POLLIN)
            for source in self._sources
            if source.inbox
        ]
