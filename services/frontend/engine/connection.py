"""The frontend's connection to the scheduler. When it is lost, it is made again."""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from protocol.codec import ProtocolError
from protocol.requests import CacheControlled, EngineState, ResetDone
from protocol.security import Security
from protocol.transport import Expelled, HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.aio import AsyncClient
from services.frontend.engine.signs_of_life import SignsOfLife
from services.frontend.errors import APIError

log = logging.getLogger("runahead.frontend")

HANDSHAKE_TIMEOUT = 5.0
"""Seconds to wait for the scheduler's answer before connecting again."""
ANSWER_TIMEOUT = 10.0
"""Seconds to wait for the answer to a question."""
RECONNECT_INTERVAL = 0.2
"""Seconds between the loss of a connection and the next attempt."""


class SchedulerConnection:
    """Connects, reads, and notices when the connection is lost.

    Args:
        silence: seconds without a message, or without the answer to a sign of life, after which the connection is lost.
        on_frame: handles a message. It may drop the connection.
        on_lost: called when the connection is lost. Its argument: the scheduler has ended it for a message that it
            could not read.
    """

    def __init__(
        self,
        endpoint: str,
        security: Security,
        silence: float,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[bool], None],
    ) -> None:
        self._endpoint = endpoint
        self._security = security
        self._silence = silence
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._client: AsyncClient | None = None
        """None: not connected."""
        self._signs = SignsOfLife(silence)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        """By number: of the questions that wait."""
        self._numbers = itertools.count(1)
        self._lease = 0
        """Lease that the scheduler has given this connection; 0: unknown."""

    @property
    def is_open(self) -> bool:
        return self._client is not None

    async def run(self) -> None:
        """Connect and read until cancelled.

        Raises: HandshakeRefused
        """
        while True:
            client = AsyncClient(self._endpoint, self._security)
            try:
                await client.handshake("frontend", f"pid {os.getpid()}", HANDSHAKE_TIMEOUT)
                self._client, self._lease, self._signs = client, 0, SignsOfLife(self._silence)
                await client.read(self._handle)
            except HandshakeTimeout:
                continue
            except ProtocolError as error:  # in place of a welcome
                log.warning("bad message from the scheduler: %s", error)
            except Expelled as error:  # one of this frontend's messages was bad
                self.drop(f"the scheduler ended the connection: {error}; connecting again", is_expelled=True)
            except PeerGone as error:
                self.drop(str(error))
            finally:
                self._client = None
                client.close()
            await asyncio.sleep(RECONNECT_INTERVAL)

    def _handle(self, frame: bytes) -> None:
        self._signs.heard()
        self._on_frame(frame)

    def on_state(self, state: EngineState) -> None:
        """The scheduler has sent its state. The connection is dropped if its lease has ended."""
        if self._lease not in (0, state.lease):
            self.drop("the scheduler has ended the requests of this frontend; connecting again")
            return
        self._lease = state.lease
        self._signs.on_state(state)

    def send_sign(self) -> None:
        """Send a sign of life. Call it every `SIGN_INTERVAL`."""
        if self._client is not None and (sign := self._signs.next()) is not None:
            self.send_quietly(sign)

    @property
    def in_doubt(self) -> bool:
        """The scheduler that is connected has been silent for too long to be ready, and not for long enough to be lost,
        at the last `check`."""
        return self._client is not None and self._signs.in_doubt

    def check(self, now: float) -> None:
        """Drop a connection without an answer. Call it every `CHECK_INTERVAL`; `now`: monotonic seconds."""
        if self._client is None:
            return
        if (loss := self._signs.loss(now)) is not None:
            self.drop(f"{loss}; connecting again")

    def drop(self, why: str, is_expelled: bool = False) -> None:
        log.warning("%s", why)
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
            log.warning("a message to the scheduler was not sent: %s", error)

    async def ask(self, make: Callable[[int], msgspec.Struct]) -> Any:
        """Send a question, which is made with a number, and return the answer. Raises: APIError, if there is none"""
        number = next(self._numbers) & 0xFFFFFFFF
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self.send_quietly(make(number))
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT)
        except TimeoutError:
            raise APIError(503, "the scheduler did not answer; try again later") from None
        finally:
            del self._answers[number]

    def on_answer(self, done: ResetDone | CacheControlled) -> None:
        if (answer := self._answers.get(done.number)) is not None and not answer.done():
            answer.set_result(done)
