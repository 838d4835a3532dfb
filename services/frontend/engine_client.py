"""The frontend's side of the scheduler's client socket: a step's tokens in, one stream per request out."""

import asyncio
import itertools
import logging
import os
from collections import deque

from protocol.codec import Decoder, ProtocolError, pack
from protocol.requests import (
    AbortRequest,
    EngineMessage,
    EnginePhase,
    EngineState,
    Finish,
    GenerateRequest,
    RequestOutputs,
)
from protocol.rows import OutputRows
from protocol.sampling import SamplingParams
from protocol.transport import HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.aio import AsyncClient
from services.frontend.errors import APIError

log = logging.getLogger("runahead.frontend")

NOT_CONNECTED = EngineState(EnginePhase.WAITING_FOR_WORKERS, "connecting to the scheduler")


class RequestStream:
    """Tokens of one request in the order of their arrival; the last event is its `Finish` or an error."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._events: deque[tuple[int, int] | Finish | APIError] = deque()
        self._wake: asyncio.Future[None] | None = None
        self.ended = False

    def put(self, event: tuple[int, int] | Finish | APIError) -> None:
        self._events.append(event)
        self.ended = self.ended or not isinstance(event, tuple)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def take(self) -> list[tuple[int, int] | Finish]:
        """Everything that is there, at least one event. Raises: APIError, when the engine is lost"""
        while not self._events:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        taken: list[tuple[int, int] | Finish] = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, APIError):
                raise event
            taken.append(event)
        return taken


class EngineClient:
    def __init__(self, endpoint: str, max_open_requests: int = 4096) -> None:
        self._endpoint = endpoint
        self._max_open = max_open_requests
        self._client: AsyncClient | None = None
        self._streams: dict[int, RequestStream] = {}
        self._numbers = itertools.count(1)
        self._decoder: Decoder[RequestOutputs | EngineState] = Decoder(EngineMessage)
        self.state = NOT_CONNECTED
        self.draining = False

    @property
    def ready(self) -> bool:
        return self.state.phase is EnginePhase.READY and not self.draining

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def run(self) -> None:
        """Connects and reads until cancelled. A lost scheduler ends the open requests and is dialled again."""
        while True:
            client = AsyncClient(self._endpoint)
            try:
                await client.handshake("frontend", f"pid {os.getpid()}", timeout=5.0)
                self._client = client
                while True:
                    self._on_frame(await client.receive())
            except HandshakeTimeout:
                continue
            except PeerGone as error:
                log.warning("%s", error)
                self._lose()
            finally:
                self._client = None
                client.close()
            await asyncio.sleep(0.2)

    def _lose(self) -> None:
        if self.state.phase is not EnginePhase.FAILED:
            self.state = NOT_CONNECTED
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.put(APIError(503, "the engine is gone; the request was not completed"))

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
            if isinstance(message, EngineState):
                self.state = message
                return
            rows = OutputRows.of(message)
        except ProtocolError as error:
            log.warning("bad message from the scheduler: %s", error)
            return
        streams = self._streams
        for number, index, token in zip(
            rows.numbers.tolist(), rows.indices.tolist(), rows.token_ids.tolist(), strict=True
        ):
            stream = streams.get(number)
            if stream is not None:
                stream.put((index, token))
        for finish in message.finished:
            stream = streams.pop(finish.number, None)
            if stream is not None:
                stream.put(finish)

    def submit(
        self, prompt: list[int], params: SamplingParams, priority: int, cache_salt: str, request_id: str
    ) -> RequestStream:
        """Raises: APIError, when the engine cannot take a request now."""
        if not self.ready or self._client is None:
            raise APIError(
                503, f"the engine is not ready: {self.state.detail or self.state.phase.name.lower()}"
            )
        if len(self._streams) >= self._max_open:
            raise APIError(429, "too many open requests; try again later")
        stream = RequestStream(next(self._numbers) & 0xFFFFFFFF)
        message = GenerateRequest(
            stream.number, pack(prompt), len(prompt), params, priority, cache_salt, request_id
        )
        try:
            self._client.send(message)
        except (PeerGone, PeerSlow):
            raise APIError(503, "the engine does not answer; try again later") from None
        self._streams[stream.number] = stream
        return stream

    def abort(self, streams: list[RequestStream]) -> None:
        """Whoever waited has left, or has all it wanted."""
        numbers = [s.number for s in streams if self._streams.pop(s.number, None) is not None]
        if numbers and self._client is not None:
            try:
                self._client.send(AbortRequest(numbers))
            except (PeerGone, PeerSlow) as error:
                log.warning("abort was not sent: %s", error)
