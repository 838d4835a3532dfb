"""The client socket: which frontends there are, by number. It knows messages, no rules."""

import logging
from collections.abc import Iterator
from contextlib import suppress

import zmq

from protocol.codec import Decoder
from protocol.handshake import Hello
from protocol.records import StepRecords, Subscribe
from protocol.requests import AbortRequest, ClientMessage, EngineState, GenerateRequest, RequestOutputs
from protocol.transport import PeerGone, PeerSlow, Server

log = logging.getLogger("runahead.scheduler")


class FrontendConnections:
    def __init__(self, endpoint: str) -> None:
        self._server = Server(endpoint, {"frontend"})
        self._decoder: Decoder[GenerateRequest | AbortRequest | Subscribe] = Decoder(ClientMessage)
        self._numbers: dict[bytes, int] = {}
        self._peers: list[bytes] = []
        """By number."""

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """`receive` has something to do when it is readable."""
        return self._server.socket

    def receive(self) -> Iterator[tuple[int, Hello | GenerateRequest | AbortRequest | Subscribe]]:
        """What has arrived, each message with the number of its frontend; a `Hello` is a new one's."""
        for peer, message in self._server.messages(self._decoder):
            if peer not in self._numbers:
                self._numbers[peer] = len(self._peers)
                self._peers.append(peer)
            yield self._numbers[peer], message

    def count_error(self, frontend: int, error: Exception) -> None:
        """A message that decodes may still be a bad one."""
        self._server.count_error(self._peers[frontend], error)

    def send(self, frontend: int, outputs: RequestOutputs) -> bool:
        """False: the frontend is lost, and turned away should it still be there."""
        peer = self._peers[frontend]
        try:
            self._server.send(peer, outputs)
        except (PeerGone, PeerSlow) as error:
            log.warning("frontend %d is lost, its requests are aborted: %s", frontend, error)
            self._server.refuse(peer, "this frontend did not read; its requests were aborted")
            return False
        return True

    def tell(self, frontend: int, message: EngineState | StepRecords) -> None:
        """Send what may be lost: a frontend that is gone is found when there are outputs for it."""
        with suppress(PeerGone, PeerSlow):
            self._server.send(self._peers[frontend], message)

    def tell_all(self, state: EngineState) -> None:
        for frontend in range(len(self._peers)):
            self.tell(frontend, state)

    def close(self, linger_ms: int) -> None:
        self._server.close(linger_ms)
