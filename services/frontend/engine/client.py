"""The frontend's side of the scheduler's client socket: a step's tokens in, one stream per request out."""

import asyncio
import itertools
import logging
import os
from dataclasses import dataclass

import numpy as np

from protocol.codec import Decoder, ProtocolError, pack
from protocol.logprobs import Logprobs
from protocol.requests import (
    AbortRequest,
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
from services.frontend.engine.inbox import Inbox, Likely, Turn
from services.frontend.errors import APIError

log = logging.getLogger("runahead.frontend")

NOT_CONNECTED = EngineState(EnginePhase.WAITING_FOR_WORKERS, "connecting to the scheduler")
HANDSHAKE_TIMEOUT = 5.0
"""Seconds until the scheduler is dialled afresh."""
REDIAL_INTERVAL = 0.2
"""Seconds after a lost connection."""

MAX_FRAMES = 64
"""Messages read in one turn of the loop, then others have theirs."""

_STATUSES = {FinishReason.REJECTED: 429, FinishReason.INVALID: 400, FinishReason.ABORT: 503}


def failure(finish: Finish, param: str | None = None) -> APIError | None:
    """What the client is told of a request that ended badly; None of others. `param`: what of the body is to blame
    where the engine finds it invalid."""
    if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return None
    status = _STATUSES.get(finish.reason, 500)
    message = finish.message or "the request was not completed"
    return APIError(status, message, param if status == 400 else None)


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
        self.turn = Turn()
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
            rows = OutputRows.from_message(message)
            self._deliver_logprobs(message.logprobs)
        except ProtocolError as error:
            self.bad_messages += 1
            log.warning("bad message from the scheduler: %s", error)
            return
        streams = self._streams
        tokens = zip(rows.indices.tolist(), rows.token_ids.tolist(), strict=True)
        for number, token in zip(rows.numbers.tolist(), tokens, strict=True):
            if (stream := streams.get(number)) is not None:
                stream.inbox.put(stream.choice, token)
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
        rows = LogprobRows.from_message(logprobs)
        ids, values, begin = rows.token_ids.tolist(), rows.values.tolist(), 0
        columns = rows.owners.view(np.uint32), rows.positions, rows.token_ranks, rows.counts
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
