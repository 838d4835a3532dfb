"""The frontend's side of the scheduler's client socket: a step's tokens in, one stream per request out."""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from starlette.types import Receive

from protocol.codec import Decoder, ProtocolError, pack
from protocol.logprobs import Logprobs
from protocol.requests import (
    AbortRequest,
    Embedding,
    EngineMessage,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    GenerateRequest,
    RequestOutputs,
)
from protocol.rows import LogprobRows, OutputRows
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.transport import HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.aio import AsyncClient
from services.frontend.errors import GONE, APIError

log = logging.getLogger("runahead.frontend")

NOT_CONNECTED = EngineState(EnginePhase.WAITING_FOR_WORKERS, "connecting to the scheduler")
HANDSHAKE_TIMEOUT = 5.0
"""Seconds until the scheduler is dialled afresh."""
REDIAL_INTERVAL = 0.2
"""Seconds after a lost connection."""

MAX_FRAMES = 64
"""Messages read in one turn of the loop, then others have theirs."""
MAX_TAKEN = 1024
"""Events handled in one turn of the loop, a few milliseconds' worth."""


class Likely(NamedTuple):
    """How likely the token at one position of a request's sequence was, and what was likeliest there."""

    position: int
    """Counted from the first token of the prompt."""
    rank: int
    """Of the token itself; 1 is the most likely."""
    token_ids: list[int]
    """The token itself, then the most likely ones, the most likely first."""
    values: list[float]
    """Their log-probabilities; minus infinity is possible."""


Event = tuple[int, int] | Likely | Embedding | Finish | APIError
"""Of one request: a token as (index in the output, id), what is known of a token (before the token itself), an
embedding, or the request's end."""


_STATUSES = {FinishReason.REJECTED: 429, FinishReason.INVALID: 400, FinishReason.ABORT: 503}


def failure(finish: Finish, param: str | None = None) -> APIError | None:
    """What the client is told of a request that ended badly; None of others. `param`: what of the body is to blame
    where the engine finds it invalid."""
    if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return None
    status = _STATUSES.get(finish.reason, 500)
    message = finish.message or "the request was not completed"
    return APIError(status, message, param if status == 400 else None)


class Inbox:
    """What has arrived for the choices of one HTTP request; its one reader is told once, however much that is."""

    def __init__(self) -> None:
        self._events: list[tuple[int, Event]] = []
        self._wake: asyncio.Future[None] | None = None
        self._reader: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_told = False

    def put(self, choice: int, event: Event) -> None:
        self._events.append((choice, event))
        if self._loop is not None:
            self._tell_soon(self._loop)
        elif self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def put_first(self, event: APIError) -> None:
        """For every choice; whatever else has arrived does not matter any more."""
        self._events.clear()
        self.put(0, event)

    def watch(self, receive: Receive) -> asyncio.Task[None]:
        """While the task runs, the reader hears of it when the client leaves."""

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.put_first(APIError(GONE, "the client closed the connection"))

        return asyncio.create_task(until_gone())

    async def take(self) -> list[tuple[int, Event]]:
        """What is there, at least one (choice, event), in order of arrival; no more than others can wait for."""
        while not self._events:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        return self.take_now()

    def take_now(self) -> list[tuple[int, Event]]:
        """`take` without waiting: perhaps nothing."""
        if len(self._events) <= MAX_TAKEN:
            taken, self._events = self._events, []
            return taken
        taken = self._events[:MAX_TAKEN]
        del self._events[:MAX_TAKEN]
        if self._loop is not None:
            self._tell_soon(self._loop)  # of the rest
        return taken

    def read_by(self, reader: Callable[[], None] | None) -> None:
        """From here on `reader` is called, in a turn of the loop of its own, when there is something to `take_now`.

        A task that waits takes several times as long to wake. None: nobody reads any more.
        """
        self._reader = reader
        self._loop = asyncio.get_running_loop() if reader is not None else None
        if self._loop is not None and self._events:
            self._tell_soon(self._loop)

    def _tell_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_told:
            self._is_told = True
            loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._is_told = False
        if self._reader is not None:
            self._reader()


@dataclass(frozen=True, slots=True)
class RequestStream:
    """An open request: where its events go."""

    number: int
    inbox: Inbox
    choice: int


class EngineClient:
    """One connection to the scheduler, and the requests that are open on it."""

    def __init__(self, endpoint: str, max_open_requests: int) -> None:
        self._endpoint = endpoint
        self._max_open = max_open_requests
        self._client: AsyncClient | None = None
        self._streams: dict[int, RequestStream] = {}
        self._numbers = itertools.count(1)
        self._decoder: Decoder[RequestOutputs | EngineState] = Decoder(EngineMessage)
        self.state = NOT_CONNECTED
        self.draining = False
        self.bad_messages = 0

    @property
    def ready(self) -> bool:
        """Whether tokens flow."""
        return self._takes_requests and self.state.phase is EnginePhase.READY

    @property
    def _takes_requests(self) -> bool:
        """While lost workers are replaced new requests may queue."""
        open_phases = (EnginePhase.READY, EnginePhase.RECOVERING)
        return self._client is not None and self.state.phase in open_phases and not self.draining

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def check_ready(self) -> None:
        """Raises: APIError, with the reason"""
        if self.draining:
            raise APIError(503, "the server is stopping; no new requests are taken")
        if not self._takes_requests:
            reason = self.state.detail or self.state.phase.name.lower().replace("_", " ")
            raise APIError(503, f"the engine is not ready: {reason}")

    async def run(self) -> None:
        """Connects and reads until cancelled. A lost scheduler ends the open requests and is dialled again.

        Raises: HandshakeRefused
        """
        while True:
            client = AsyncClient(self._endpoint)
            try:
                await client.handshake("frontend", f"pid {os.getpid()}", HANDSHAKE_TIMEOUT)
                self._client = client
                for count in itertools.count(1):
                    self._on_frame(await client.receive())
                    if not count % MAX_FRAMES:
                        await asyncio.sleep(0)  # `receive` does not give way while there is something to read
            except HandshakeTimeout:
                continue
            except ProtocolError as error:  # instead of a welcome
                self.bad_messages += 1
                log.warning("bad message from the scheduler: %s", error)
            except PeerGone as error:
                log.warning("%s", error)
                if self.state.phase is not EnginePhase.FAILED:
                    self.state = NOT_CONNECTED
                self._client = None
                self.fail_all(APIError(503, "the engine is gone; the request was not completed"))
            finally:
                self._client = None
                client.close()
            await asyncio.sleep(REDIAL_INTERVAL)

    def fail_all(self, error: APIError) -> None:
        """Ends every open request with `error`."""
        streams = list(self._streams.values())
        self.abort(streams)
        for stream in streams:
            stream.inbox.put(stream.choice, error)

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
            if isinstance(message, EngineState):
                self.state = message
                return
            rows = OutputRows.of(message)
            self._deliver_logprobs(message.logprobs)
        except ProtocolError as error:
            self.bad_messages += 1
            log.warning("bad message from the scheduler: %s", error)
            return
        streams = self._streams
        columns = rows.numbers.tolist(), rows.indices.tolist(), rows.token_ids.tolist()
        for number, index, token in zip(*columns, strict=True):
            if (stream := streams.get(number)) is not None:
                stream.inbox.put(stream.choice, (index, token))
        for embedding in message.embeddings:
            if (stream := streams.get(embedding.number)) is not None:
                stream.inbox.put(stream.choice, embedding)
        for finish in message.finished:
            if (stream := streams.pop(finish.number, None)) is not None:
                stream.inbox.put(stream.choice, finish)

    def _deliver_logprobs(self, logprobs: Logprobs | None) -> None:
        """Raises: ProtocolError, before anything was delivered"""
        if logprobs is None:
            return
        rows = LogprobRows.of(logprobs)
        ids, values, begin = rows.token_ids.tolist(), rows.values.tolist(), 0
        columns = rows.owners.view(np.uint32), rows.positions, rows.ranks, rows.counts
        for number, position, rank, count in zip(*(column.tolist() for column in columns), strict=True):
            end = begin + count
            if (stream := self._streams.get(number)) is not None:
                row = Likely(position, rank, ids[begin:end], values[begin:end])
                stream.inbox.put(stream.choice, row)
            begin = end

    def submit(
        self,
        inbox: Inbox,
        choice: int,
        prompt: list[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        request_id: str,
        structured: StructuredOutputParams | None = None,
        pooling: Pooling = Pooling.NONE,
    ) -> RequestStream:
        """Sends a request; its events will arrive in `inbox` under `choice`, the last is its end.

        Raises: APIError, when the engine cannot take a request now.
        """
        self.check_ready()
        if self._client is None or len(self._streams) >= self._max_open:
            raise APIError(429, f"{self._max_open} requests are open already; try again later")
        stream = RequestStream(self._next_number(), inbox, choice)
        message = GenerateRequest(
            stream.number,
            pack(prompt),
            len(prompt),
            params,
            priority,
            cache_salt,
            request_id,
            structured,
            pooling,
        )
        try:
            self._client.send(message)
        except (PeerGone, PeerSlow):
            raise APIError(503, "the engine does not answer; try again later") from None
        self._streams[stream.number] = stream
        return stream

    def _next_number(self) -> int:
        """uint32, and none that is still open after four billion others."""
        while (number := next(self._numbers) & 0xFFFFFFFF) in self._streams:
            pass
        return number

    def abort(self, streams: list[RequestStream]) -> None:
        """Whoever waited has left, or has all it wanted. What has ended already is ignored."""
        numbers = [s.number for s in streams if self._streams.pop(s.number, None) is not None]
        if numbers and self._client is not None:
            try:
                self._client.send(AbortRequest(numbers))
            except (PeerGone, PeerSlow) as error:
                log.warning("an abort was not sent: %s", error)
