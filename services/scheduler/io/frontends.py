"""The client socket: the connected frontends by number, and their leases."""

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from protocol.codec import Decoder
from protocol.handshake import Hello
from protocol.requests import ClientMessage, EngineState, FrontendAlive, RequestOutputs, RoundTrips
from protocol.security import LOCAL, Security
from protocol.transport import PeerGone, PeerSlow, Server

log = logging.getLogger("runahead.scheduler")


@dataclass(slots=True)
class _Connected:
    peer: bytes
    sign: int = 0
    """Number of its last sign of life."""
    heard: float | None = None
    """When its last message arrived; None: it never sent a sign of life, and has no lease."""


class FrontendConnections:
    """A frontend keeps its number while it is connected; no number is used twice.

    It renews its lease with every message. Without a sign of life it has none, and only the loss of its connection ends
    its requests.
    """

    def __init__(self, endpoint: str, security: Security = LOCAL) -> None:
        self.server = Server(endpoint, {"frontend"}, security)
        self._decoder: Decoder[ClientMessage] = Decoder(ClientMessage)
        self._numbers: dict[bytes, int] = {}
        self.peers: dict[int, _Connected] = {}
        """Frontends that are not known to be gone, by number, in the order of arrival."""
        self._unused = itertools.count()
        self._gone: list[int] = []

    def receive(self) -> Iterator[tuple[int, Hello | ClientMessage]]:
        """Yield what has arrived, each message with the number of its frontend; a new frontend's first is a `Hello`."""
        now = time.monotonic()
        for peer, message in self.server.messages(self._decoder):
            if peer not in self._numbers:
                self._numbers[peer] = number = next(self._unused)
                self.peers[number] = _Connected(peer)
            frontend = self.peers[self._numbers[peer]]
            if isinstance(message, FrontendAlive):
                frontend.sign, frontend.heard = message.number, now
            elif frontend.heard is not None:
                frontend.heard = now
            yield self._numbers[peer], message

    def take_gone(self) -> list[int]:
        """Return the frontends that were found to be gone, or were expelled, since the last call."""
        for peer in self.server.take_lost():
            if (number := self._numbers.get(peer)) is not None:
                self._lose(number, PeerGone("its connection has ended"))
        gone, self._gone = self._gone, []
        return gone

    def count_error(self, frontend: int, error: Exception) -> None:
        """Count and log a message that decodes, but is not valid."""
        self.server.count_error(self.peers[frontend].peer if frontend in self.peers else b"", error)

    def send(self, frontend: int, outputs: RequestOutputs) -> None:
        """Send as `send_if_connected` does. A frontend that does not read is turned away."""
        if not self.send_if_connected(frontend, outputs):
            self.server.refuse(self.peers[frontend].peer, "this frontend did not read; its requests were aborted")
            self._lose(frontend, PeerSlow("it does not read"))

    def send_state(self, frontend: int, state: EngineState) -> None:
        """Send the state as `send_if_connected` does, with the lease of its number, and the answer to its last sign
        of life."""
        unanswered = state.round_trips.unanswered if state.round_trips is not None else []
        sign = self.peers[frontend].sign if frontend in self.peers else 0
        self.send_if_connected(frontend, replace(state, lease=frontend + 1, round_trips=RoundTrips(sign, unanswered)))

    def send_if_connected(self, frontend: int, message: Struct) -> bool:
        """Send what may be lost. A frontend that is gone is in the next `take_gone`. Return False for one that does not
        read."""
        try:
            if (connected := self.peers.get(frontend)) is not None:
                self.server.send(connected.peer, message)
        except PeerGone as error:
            self._lose(frontend, error)
        except PeerSlow:
            return False
        return True

    def send_state_to_all(self, state: EngineState) -> None:
        for frontend in list(self.peers):
            self.send_state(frontend, state)

    def end_leases(self, before: float) -> None:
        """Lose the frontends that were last heard before that time. Call it after everything that has arrived was read.
        If one sends something again, it gets a new number, and is sent that number with the state."""
        for number, frontend in list(self.peers.items()):
            if frontend.heard is not None and frontend.heard < before:
                self._lose(number, PeerGone("it has sent no sign of life"))

    def _lose(self, frontend: int, error: Exception) -> None:
        log.info("frontend %d is gone: %s", frontend, error)
        del self._numbers[self.peers.pop(frontend).peer]
        self._gone.append(frontend)

    def close(self, linger_ms: int) -> None:
        self.server.close(linger_ms)
