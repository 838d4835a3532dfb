"""The frontend's connection to the scheduler. When it is lost, it is made again."""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from protocol.codec import ProtocolError
from protocol.requests import CacheControlled, ControlCache, EnginePhase, EngineState, FrontendAlive
from protocol.security import Security
from protocol.silence import SilenceWatch, unanswered
from protocol.transport import Expelled, HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.aio import AsyncClient
from services.frontend.engine.availability import STARTING

log = logging.getLogger("runahead.frontend")

HANDSHAKE_TIMEOUT = 5.0
"""Seconds to wait for the scheduler's answer before connecting again."""
ANSWER_TIMEOUT = 10.0
"""Seconds to wait for the answer to a question."""
RECONNECT_INTERVAL = 0.2
"""Seconds between the loss of a connection and the next attempt. Each bad message of a connection doubles it."""
REFUSED_PAUSE = 10.0
"""Seconds until an engine that was refused is connected to again, and at most after bad messages. Another one may be in
its place then."""
CHECK_INTERVAL = 0.25
"""Seconds between two checks for silence."""
DOUBT_SECONDS = 2.0
"""Seconds without a sign of life, beyond the delays of the machine, after which the scheduler is not ready. It is lost,
and another one is connected to, much later."""


@dataclass(eq=False)
class SchedulerConnection:
    """Connects, reads, and notices when the connection is lost."""

    _engine: str
    """Its name, for logs."""
    _endpoint: str
    _security: Security
    _silence: float
    """Seconds without a message, or without the answer to a sign of life, after which the connection is lost."""
    _on_frame: Callable[[bytes], None]
    """Handles a message. It may drop the connection."""
    _on_lost: Callable[[bool], None]
    """Called when the connection is lost. Its argument: the scheduler has ended it for a message that it could not
    read."""

    def __post_init__(self) -> None:
        self._client: AsyncClient | None = None
        """None: not connected."""
        self._answers: dict[int, asyncio.Future[CacheControlled]] = {}
        """By number: of the questions that wait."""
        self._numbers = itertools.count(1)
        self.pause = RECONNECT_INTERVAL
        """Seconds between the next loss and the attempt behind it."""
        self._incarnation = 0
        """The last scheduler that has sent its state."""
        self._begin()

    def _begin(self) -> None:
        """Set what is known of a new connection."""
        self._lease = 0
        """Lease that the scheduler has given this connection; 0: unknown."""
        self._may_close = False
        """The scheduler is stopping, or serves nothing yet: it closes the connection in order."""
        self._watch = SilenceWatch(self._silence, CHECK_INTERVAL)
        self._watch.heard()  # the answer to the handshake
        self._sent = self._answered = 0
        """Numbers of signs of life: the last one that was sent, and the last one that was answered."""
        self._exchanges_signs = True
        """The scheduler sends signs of life. One without an incarnation does not."""

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def run(self) -> None:
        """Connect and read until cancelled.

        Raises: HandshakeRefused
        """
        complaint = ""
        while True:
            client, began = AsyncClient(self._endpoint, self._security), time.monotonic()
            try:
                await client.handshake("frontend", f"pid {os.getpid()}", HANDSHAKE_TIMEOUT)
                self._client = client
                self._begin()
                await client.read(self._handle)
            except HandshakeTimeout as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.info("%s; trying again", complaint)
                continue
            except Expelled as error:  # one of this frontend's messages was bad
                self.drop(f"the scheduler ended the connection: {error}; connecting again", is_expelled=True)
            except PeerGone as error:
                self.drop(str(error), is_fault=not self._may_close)
            finally:
                self._client = None
                client.close()
            if time.monotonic() - began > REFUSED_PAUSE:
                self.pause = RECONNECT_INTERVAL
            await asyncio.sleep(self.pause)

    def on_bad_message(self, error: ProtocolError) -> None:
        """Drop the connection. It is made again later each time, as the next one may begin with the same message."""
        self.pause = min(2 * self.pause, REFUSED_PAUSE)
        self.drop(f"bad message from the scheduler: {error}; connecting again")

    def _handle(self, frame: bytes) -> None:
        self._watch.heard()
        self._on_frame(frame)

    def on_state(self, state: EngineState) -> None:
        """The scheduler has sent its state. The connection is dropped if its lease has ended."""
        if self._lease not in (0, state.lease):
            self.drop("the scheduler has ended the requests of this frontend; connecting again")
            return
        self._lease, self._may_close = state.lease, state.phase in (EnginePhase.DRAINING, *STARTING)
        self._exchanges_signs = state.incarnation > 0
        if state.incarnation != self._incarnation:  # the bad messages were another scheduler's
            self._incarnation, self.pause = state.incarnation, RECONNECT_INTERVAL
        self._answered = self._sent if state.round_trips is None else state.round_trips.number

    def send_sign(self) -> None:
        """Send a sign of life. Call it every `SIGN_INTERVAL`."""
        if self._client is not None and self._exchanges_signs:
            self._sent += 1
            self.send_quietly(FrontendAlive(self._sent))

    @property
    def in_doubt(self) -> bool:
        """The scheduler that is connected has been silent for too long to be ready, and not for long enough to be lost,
        at the last `check`."""
        return self._client is not None and self._exchanges_signs and self._watch.exceeds(DOUBT_SECONDS)

    def check(self, now: float) -> None:
        """Drop a connection without an answer. Call it every `CHECK_INTERVAL`; `now`: monotonic seconds."""
        if self._client is None or not self._exchanges_signs:
            return
        if self._watch.check(now) is not None:
            self.drop("the scheduler is silent; connecting again")
        elif unanswered(self._sent, self._answered) > self._silence:
            self.drop("the scheduler does not answer; connecting again")

    def drop(self, why: str, is_expelled: bool = False, is_fault: bool = True) -> None:
        log.log(logging.WARNING if is_fault else logging.INFO, "engine %s: %s", self._engine, why)
        client, self._client = self._client, None
        self._on_lost(is_expelled)
        if client is not None:
            client.stop()

    def send(self, message: msgspec.Struct) -> bool:
        """Send a message. Return False if the connection is lost; it is dropped if the message cannot be sent."""
        if self._client is None:
            return False
        try:
            self._client.send(message)
        except (PeerGone, PeerSlow) as error:
            self.drop(str(error))
            return False
        return True

    def send_quietly(self, message: msgspec.Struct) -> None:
        """Send what the next scheduler does not need."""
        if self._client is None:
            return
        try:
            self._client.send(message)
        except (PeerGone, PeerSlow) as error:
            log.warning("engine %s: a message to the scheduler was not sent: %s", self._engine, error)

    async def ask(self, make: Callable[[int], ControlCache]) -> CacheControlled | None:
        """Send a question, which is made with a number, and return the answer; None: there is none in time."""
        number = next(self._numbers) & 0xFFFFFFFF
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.send_quietly(make(number))
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT)
        except TimeoutError:
            return None
        finally:
            del self._answers[number]

    def on_answer(self, done: CacheControlled) -> None:
        if (answer := self._answers.get(done.number)) is not None and not answer.done():
            answer.set_result(done)
