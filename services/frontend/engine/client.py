"""The frontend's connection to the scheduler. What is open on it is in the ledger, and survives the connection."""

import asyncio
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from protocol.codec import Decoder, ProtocolError, encode, pack
from protocol.logprobs import Logprobs
from protocol.requests import (
    AbortRequest,
    EngineMessage,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    FrontendAlive,
    GenerateRequest,
    RequestOutputs,
    ResetDone,
    ResetPrefixCache,
)
from protocol.rows import LogprobRows, OutputRows
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.security import LOCAL, Security
from protocol.transport import HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow
from protocol.transport.aio import AsyncClient
from services.frontend.engine.ledger import RequestLedger
from services.frontend.engine.streams import FlushQueue, RawLogprobs, RequestStream
from services.frontend.errors import APIError

log = logging.getLogger("runahead.frontend")

NOT_CONNECTED = EngineState(EnginePhase.WAITING_FOR_WORKERS, "connecting to the scheduler")
HANDSHAKE_TIMEOUT = 5.0
"""Seconds to wait for the scheduler's answer before connecting again."""
RECONNECT_INTERVAL = 0.2
"""Seconds between the loss of a connection and the next attempt."""
RESET_TIMEOUT = 10.0
"""Seconds to wait for the answer to a reset of the prefix cache."""

TICK = 1.0
"""Seconds between two signs of life, and between two checks for those of the scheduler."""
SERVING = (EnginePhase.READY, EnginePhase.RECOVERING)
"""Phases of an engine that takes requests."""
STARTING = (EnginePhase.WAITING_FOR_WORKERS, EnginePhase.LOADING)
SIZES = ("max_model_len", "vocab_size", "num_blocks", "block_size", "max_num_seqs", "hidden_size")
"""Fields of `EngineState` that requests are checked against."""

MAX_RECOVERIES = 64
"""Losses and returns of the engine that are kept for traces."""
MAX_SHEDDING = 1.0
"""Seconds after a refusal for load in which no further request is sent to the scheduler, at most."""

MAX_FRAMES = 64
"""Messages decoded before other tasks of the event loop run."""

_requests: Decoder[GenerateRequest] = Decoder(GenerateRequest)
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
    return APIError(status, message, param if status == 400 else None, retry_after=finish.retry_after)


@dataclass(frozen=True)
class RequestContext:
    """Fields that all engine requests of one HTTP request share."""

    request_id: str = ""
    """The HTTP request's id, for logs."""
    priority: int = 0
    cache_salt: str = ""
    structured: StructuredOutputParams | None = None
    pooling: Pooling = Pooling.NONE


class Recovery(NamedTuple):
    """Loss of workers or of the scheduler, or the end of the pause that followed."""

    at: float
    """Monotonic seconds."""
    name: str
    reason: str


class EngineClient:
    """Sends requests to the scheduler and groups the rows of its messages by request.

    Args:
        silence: seconds without a message after which the scheduler is lost.
        patience: seconds that open requests wait for another scheduler.
        request_timeout: seconds without progress after which a request ends.
        tokenizer: digest of this frontend's tokenizer.json, to compare with the scheduler's; "": not compared.
    """

    def __init__(
        self,
        endpoint: str,
        max_open_requests: int,
        silence: float,
        patience: float,
        request_timeout: float,
        security: Security = LOCAL,
        tokenizer: str = "",
    ) -> None:
        self._endpoint = endpoint
        self._security = security
        self._tokenizer = tokenizer
        self._max_open = max_open_requests
        self._silence = silence
        self._patience = patience
        self._request_timeout = request_timeout
        self._client: AsyncClient | None = None
        self._reading: asyncio.Task[None] | None = None
        self.ledger = RequestLedger()
        self._numbers = itertools.count(1)
        self._resets: dict[int, asyncio.Future[bool]] = {}
        """Resets of the prefix cache without an answer."""
        self._reset_numbers = itertools.count(1)
        self._decoder: Decoder[RequestOutputs | EngineState | ResetDone] = Decoder(EngineMessage)
        self._last_frame = 0.0
        """When the scheduler was last heard: seconds on the loop's clock, measured once a tick."""
        self._heard = False
        """A message has arrived since the last tick."""
        self._takes_requests = False
        """The scheduler that is connected executes requests, or will when it has its workers again."""
        self._lost_at: float | None = None
        """When an engine that served was lost, until another one serves; monotonic seconds."""
        self._overloaded_until = 0.0
        """Until then the scheduler refuses new requests for load; monotonic seconds."""
        self.num_shed = 0
        """Requests that were refused for load before they were read."""
        self.flush_queue = FlushQueue()
        self._state = NOT_CONNECTED
        self.draining = False
        self.recoveries: deque[Recovery] = deque(maxlen=MAX_RECOVERIES)
        """The latest ones, in order."""

    @property
    def state(self) -> EngineState:
        return self._state

    @state.setter
    def state(self, state: EngineState) -> None:
        was_lost, is_lost = (s.phase is EnginePhase.RECOVERING for s in (self._state, state))
        if is_lost and not was_lost:
            self.recoveries.append(Recovery(time.monotonic(), "engine lost", state.detail))
        elif was_lost and state.phase is EnginePhase.READY:
            self.recoveries.append(Recovery(time.monotonic(), "engine recovered", ""))
        self._state = state

    @property
    def ready(self) -> bool:
        """True if requests are executed now."""
        return self._accepts_requests and self._takes_requests and self.state.phase is EnginePhase.READY

    @property
    def _accepts_requests(self) -> bool:
        """New requests may queue while lost workers, or a lost scheduler, are replaced."""
        return self.state.phase in SERVING and not self.draining

    @property
    def num_open(self) -> int:
        return len(self.ledger)

    def check_ready(self) -> None:
        """Raises: APIError, with the reason"""
        if self.draining:
            raise APIError(503, "the server is stopping; no new requests are taken")
        if not self._accepts_requests:
            reason = self.state.detail or self.state.phase.name.lower().replace("_", " ")
            raise APIError(503, f"the engine is not ready: {reason}")

    def check_load(self) -> None:
        """Refuse a request before it is read, if the scheduler would certainly refuse it for load.

        So the work for refused requests does not delay the outputs of admitted ones.

        Raises: APIError
        """
        left = self._overloaded_until - time.monotonic()
        if left > 0:
            self.num_shed += 1
            raise APIError(429, "the server is overloaded; try again later", retry_after=left)

    async def run(self) -> None:
        """Connect and read until cancelled. When the scheduler is lost, connect to the next one, which gets the open
        requests with the tokens that were delivered.

        Raises: HandshakeRefused
        """
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                client = AsyncClient(self._endpoint, self._security)
                try:
                    await client.handshake("frontend", f"pid {os.getpid()}", HANDSHAKE_TIMEOUT)
                    self._client = client
                    await self._read_until_dropped(client)
                except HandshakeTimeout:
                    continue
                except ProtocolError as error:  # in place of a welcome
                    log.warning("bad message from the scheduler: %s", error)
                except PeerGone as error:
                    log.warning("%s", error)
                    self._on_lost()
                finally:
                    self._client = None
                    client.close()
                await asyncio.sleep(RECONNECT_INTERVAL)
        finally:
            watch.cancel()

    async def _read_until_dropped(self, client: AsyncClient) -> None:
        """Raises: PeerGone, HandshakeRefused"""
        self._reading = reading = asyncio.create_task(self._read(client))
        try:
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.result()
        finally:
            if reading.cancel():
                await asyncio.wait({reading})

    async def _read(self, client: AsyncClient) -> None:
        """Raises: PeerGone, HandshakeRefused"""
        for count in itertools.count(1):
            self._on_frame(await client.receive())
            if not count % MAX_FRAMES:
                await asyncio.sleep(0)  # `receive` does not yield while there is something to read

    # -- loss of the scheduler -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Send signs of life, and notice silence and the end of patience."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK)
            now = time.monotonic()
            # Half of a lease: the scheduler may have noticed the pause earlier than this process.
            was_stopped, last = now - last > max(self._silence / 2, 1.5 * TICK), now
            if self._heard or self._client is None or not self.state.incarnation:
                self._last_frame = now
            self._heard = False
            if self._client is not None and self.state.incarnation:
                self._send_quietly(FrontendAlive())
                if was_stopped or now - self._last_frame > self._silence:
                    why = "this frontend was stopped" if was_stopped else "the scheduler is silent"
                    self._drop_connection(f"{why}; connecting again")
            if stuck := self.ledger.stuck(now, self._request_timeout):
                why = f"the request made no progress for {self._request_timeout:g} s (--request-timeout)"
                self._fail(stuck, APIError(504, why))
            if self._lost_at is not None and now - self._lost_at > self._patience:
                self._lost_at, self.state = None, NOT_CONNECTED if self._client is None else self.state
                self.fail_all(APIError(503, "the engine is gone; the request was not completed"))

    def _drop_connection(self, why: str) -> None:
        log.warning("%s", why)
        self._last_frame = time.monotonic()
        self._on_lost()
        if self._reading is not None:
            self._reading.cancel()

    def _on_lost(self) -> None:
        """Open requests wait for the next scheduler, and so do new ones if this one served."""
        self._client, self._takes_requests = None, False
        self.ledger.disconnected()
        if self.state.phase is EnginePhase.FAILED:
            return
        if self.state.phase in (*SERVING, EnginePhase.DRAINING):
            self._lost_at = self._lost_at or time.monotonic()
            self.state = replace(
                self.state,
                phase=EnginePhase.RECOVERING,
                detail="the scheduler is lost; waiting for another one",
            )
        elif self._lost_at is None:
            self.state = NOT_CONNECTED

    def fail_all(self, error: APIError) -> None:
        """End every open request with `error`."""
        self._fail(list(self.ledger.streams.values()), error)

    def _fail(self, streams: list[RequestStream], error: APIError) -> None:
        self.abort(streams)
        for stream in streams:
            stream.end = error
            stream.response.mark_due(stream)

    # -- messages of the scheduler -------------------------------------------------------------------------------

    def _check_tokenizer(self, state: EngineState) -> None:
        """Raises: HandshakeRefused, if the scheduler compiles grammars for another tokenizer."""
        ours, theirs = self._tokenizer, state.tokenizer
        if ours and theirs and ours != theirs:
            raise HandshakeRefused(
                f"tokenizer mismatch: tokenizer.json of this frontend has the digest {ours}, that of the scheduler "
                f"{theirs}; give both the same --model and --tokenizer"
            )

    def _on_state(self, state: EngineState) -> None:
        self._check_tokenizer(state)
        self._takes_requests = state.phase in SERVING
        if self._takes_requests:
            self._lost_at = None
        elif self._lost_at is not None and state.phase in STARTING:
            # The sizes of the last engine hold, so that new requests can be checked; `phase` shows the recovery.
            sizes = {name: getattr(self.state, name) for name in SIZES}
            state = replace(state, phase=EnginePhase.RECOVERING, **sizes)
        self.state = state
        self._submit_open()

    def _submit_open(self) -> None:
        """Send what the scheduler does not have yet."""
        if self._client is None or not self._takes_requests:
            return
        before = self.ledger.resubmitted
        for message in self.ledger.submissions(self.state.incarnation, time.monotonic()):
            try:
                self._client.send(message)
            except (PeerGone, PeerSlow) as error:
                self._drop_connection(str(error))
                return
        if (count := self.ledger.resubmitted - before) > 0:
            log.info("%d open requests were submitted again", count)

    def _on_frame(self, frame: bytes) -> None:
        self._heard = True
        try:
            message = self._decoder.decode(frame)
            if isinstance(message, EngineState):
                self._on_state(message)
                return
            if isinstance(message, ResetDone):
                if (answer := self._resets.get(message.number)) is not None and not answer.done():
                    answer.set_result(message.complete)
                return
            if message.incarnation != self.state.incarnation:
                log.warning("a message of another scheduler was dropped")
                return
            rows = OutputRows.from_message(message)
            self._group_logprobs(message.logprobs)
        except ProtocolError as error:
            log.warning("bad message from the scheduler: %s", error)
            return
        tokens = zip(rows.indices.tolist(), rows.token_ids.tolist(), strict=True)
        self.ledger.deliver(rows.numbers.tolist(), tokens)
        for embedding in message.embeddings:
            if (stream := self.ledger.streams.get(embedding.number)) is not None:
                stream.add_embedding(embedding.values)
        for finish in message.finished:
            if finish.retry_after:
                self._overloaded_until = time.monotonic() + min(finish.retry_after, MAX_SHEDDING)
            self.ledger.end(finish.number, finish)
        if message.finished and self.ledger.has_unsent:
            self._submit_open()

    def _group_logprobs(self, logprobs: Logprobs | None) -> None:
        """Raises: ProtocolError, before anything was stored"""
        if logprobs is None:
            return
        rows = LogprobRows.from_message(logprobs)
        ids, values, begin = rows.token_ids.tolist(), rows.values.tolist(), 0
        columns = rows.owners.view(np.uint32), rows.positions, rows.token_ranks, rows.counts
        for number, position, rank, count in zip(*(column.tolist() for column in columns), strict=True):
            end = begin + count
            if (stream := self.ledger.streams.get(number)) is not None:
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
        if len(self.ledger) >= self._max_open:
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
        try:  # the scheduler would expel this frontend, with all its streams
            _requests.decode(encode(message))
        except (ProtocolError, ValueError) as error:
            raise APIError(400, f"the request exceeds a limit of the engine: {error}") from None
        self.ledger.open(stream, message, time.monotonic())
        self._submit_open()
        log.debug(
            "request accepted: request_id=%s number=%d prompt_tokens=%d",
            context.request_id, stream.number, len(prompt),
        )  # fmt: skip

    def _next_number(self) -> int:
        """Return a uint32 that no open request has, also after the counter has wrapped around."""
        while (number := next(self._numbers) & 0xFFFFFFFF) in self.ledger.streams:
            pass
        return number

    def abort(self, streams: Iterable[RequestStream]) -> None:
        """End requests whose outputs are no longer needed. Those that have ended are ignored."""
        numbers = [stream.number for stream in streams if self.ledger.close(stream.number) is not None]
        if numbers:
            self._send_quietly(AbortRequest(numbers, self.state.incarnation))

    async def reset_prefix_cache(self, reset_running: bool) -> bool:
        """Empty the prefix cache. Return False if running requests still share blocks.

        Raises: APIError, if the scheduler does not answer
        """
        self.check_ready()
        number = next(self._reset_numbers) & 0xFFFFFFFF
        answer = self._resets[number] = asyncio.get_running_loop().create_future()
        try:
            self._send_quietly(ResetPrefixCache(number, reset_running))
            return await asyncio.wait_for(answer, RESET_TIMEOUT)
        except TimeoutError:
            raise APIError(503, "the scheduler did not answer; try again later") from None
        finally:
            del self._resets[number]

    def _send_quietly(self, message: AbortRequest | FrontendAlive | ResetPrefixCache) -> None:
        """Send what the next scheduler does not need."""
        if self._client is None:
            return
        try:
            self._client.send(message)
        except (PeerGone, PeerSlow) as error:
            log.warning("a message to the scheduler was not sent: %s", error)
