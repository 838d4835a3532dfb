"""The frontend's connection to the scheduler, and the requests that are open on it."""

import asyncio
import itertools
import logging
import os
from collections.abc import Iterable
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
from services.frontend.engine.streams import FlushQueue, RawLogprobs, RequestStream
from services.frontend.errors import APIError

log = logging.getLogger("runahead.frontend")

NOT_CONNECTED = EngineState(EnginePhase.WAITING_FOR_WORKERS, "connecting to the scheduler")
HANDSHAKE_TIMEOUT = 5.0
"""Seconds to wait for the scheduler's answer before connecting again."""
RECONNECT_INTERVAL = 0.2
"""Seconds between the loss of a connection and the next attempt."""

MAX_FRAMES = 64
"""Messages decoded before other tasks of the event loop run."""

_STATUSES = {FinishReason.REJECTED: 429, FinishReason.INVALID: 400, FinishReason.ABORT: 503}


def failure(finish: Finish, param: str | None = None) -> APIError | None:
    """Return the error for the client if the request failed, else None.

    Args:
        param: the field of the body that the error names if the engine found the request invalid.
    """
    if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return None
    status = _STATUSES.get(finish.reason, 500)
    message = finish.message or "the request was not completed"
    return APIError(status, message, param if status == 400 else None)


@dataclass(frozen=True)
class RequestContext:
    """Fields that all engine requests of one HTTP request share."""

    request_id: str = ""
    """The HTTP request's id, for logs."""
    priority: int = 0
    cache_salt: str = ""
    structured: StructuredOutputParams | None = None
    pooling: Pooling = Pooling.NONE


class EngineClient:
    """Sends requests to the scheduler and groups the rows of its messages by request."""

    def __init__(self, endpoint: str, max_open_requests: int) -> None:
        self._endpoint = endpoint
        self._max_open = max_open_requests
        self._client: AsyncClient | None = None
        self._streams: dict[int, RequestStream] = {}
        """Open requests by number."""
        self._numbers = itertools.count(1)
        self._decoder: Decoder[RequestOutputs | EngineState] = Decoder(EngineMessage)
        self.flush_queue = FlushQueue()
        self.state = NOT_CONNECTED
        self.draining = False

    @property
    def ready(self) -> bool:
        """True if requests are executed now."""
        return self._accepts_requests and self.state.phase is EnginePhase.READY

    @property
    def _accepts_requests(self) -> bool:
        """New requests may queue while lost workers are replaced."""
        open_phases = (EnginePhase.READY, EnginePhase.RECOVERING)
        return self._client is not None and self.state.phase in open_phases and not self.draining

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def check_ready(self) -> None:
        """Raises: APIError, with the reason"""
        if self.draining:
            raise APIError(503, "the server is stopping; no new requests are taken")
        if not self._accepts_requests:
            reason = self.state.detail or self.state.phase.name.lower().replace("_", " ")
            raise APIError(503, f"the engine is not ready: {reason}")

    async def run(self) -> None:
        """Connect and read until cancelled. When the scheduler is lost, fail the open requests and connect again.

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
                        await asyncio.sleep(0)  # `receive` does not yield while there is something to read
            except HandshakeTimeout:
                continue
            except ProtocolError as error:  # in place of a welcome
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
            await asyncio.sleep(RECONNECT_INTERVAL)

    def fail_all(self, error: APIError) -> None:
        """End every open request with `error`."""
        streams = list(self._streams.values())
        self.abort(streams)
        for stream in streams:
            stream.end = error
            stream.response.mark_due(stream)

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
            if isinstance(message, EngineState):
                self.state = message
                return
            rows = OutputRows.from_message(message)
            self._group_logprobs(message.logprobs)
        except ProtocolError as error:
            log.warning("bad message from the scheduler: %s", error)
            return
        streams = self._streams
        tokens = zip(rows.indices.tolist(), rows.token_ids.tolist(), strict=True)
        for number, token in zip(rows.numbers.tolist(), tokens, strict=True):
            if (stream := streams.get(number)) is not None:
                stream.tokens.append(token)
                if not stream.is_due:  # as `mark_due` would find, without a call per token
                    stream.response.mark_due(stream)
        for embedding in message.embeddings:
            if (stream := streams.get(embedding.number)) is not None:
                stream.add_embedding(embedding.values)
        for finish in message.finished:
            if (stream := streams.pop(finish.number, None)) is not None:
                stream.end = finish
                stream.response.mark_due(stream)

    def _group_logprobs(self, logprobs: Logprobs | None) -> None:
        """Raises: ProtocolError, before anything was stored"""
        if logprobs is None:
            return
        rows = LogprobRows.from_message(logprobs)
        ids, values, begin = rows.token_ids.tolist(), rows.values.tolist(), 0
        columns = rows.owners.view(np.uint32), rows.positions, rows.token_ranks, rows.counts
        for number, position, rank, count in zip(*(column.tolist() for column in columns), strict=True):
            end = begin + count
            if (stream := self._streams.get(number)) is not None:
                stream.add_logprobs(RawLogprobs(position, rank, ids[begin:end], values[begin:end]))
                stream.response.mark_due(stream)
            begin = end

    def submit(
        self, stream: RequestStream, prompt: list[int], params: SamplingParams, context: RequestContext
    ) -> None:
        """Send a request; its outputs arrive in `stream`.

        Raises: APIError, when the engine cannot take a request now
        """
        self.check_ready()
        if self._client is None or len(self._streams) >= self._max_open:
            raise APIError(429, f"{self._max_open} requests are open already; try again later")
        stream.number = self._next_number()
        message = GenerateRequest(
            stream.number,
            pack(prompt),
            len(prompt),
            params,
            context.priority,
            context.cache_salt,
            context.request_id,
            context.structured,
            context.pooling,
        )
        try:
            self._client.send(message)
        except (PeerGone, PeerSlow):
            raise APIError(503, "the engine does not answer; try again later") from None
        self._streams[stream.number] = stream
        log.debug(
            "request accepted: request_id=%s number=%d prompt_tokens=%d",
            context.request_id, stream.number, len(prompt),
        )  # fmt: skip

    def _next_number(self) -> int:
        """Return a uint32 that no open request has, also after the counter has wrapped around."""
        while (number := next(self._numbers) & 0xFFFFFFFF) in self._streams:
            pass
        return number

    def abort(self, streams: Iterable[RequestStream]) -> None:
        """End requests whose outputs are no longer needed. Those that have ended are ignored."""
        open_streams = [stream for stream in streams if self._streams.pop(stream.number, None) is not None]
        if open_streams and self._client is not None:
            try:
                self._client.send(AbortRequest([stream.number for stream in open_streams]))
            except (PeerGone, PeerSlow) as error:
                ids = dict.fromkeys(stream.response.request_id for stream in open_streams)
                log.warning("an abort was not sent: request_id=%s: %s", ",".join(ids), error)
