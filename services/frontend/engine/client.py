"""Requests to the scheduler and its answers. The open ones are in the ledger, and survive the connection."""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from protocol.codec import Decoder, ProtocolError, encode, pack
from protocol.logprobs import Logprobs
from protocol.records import StepRecords, Subscribe
from protocol.requests import (
    AbortRequest,
    EngineMessage,
    EngineState,
    Finish,
    FinishReason,
    GenerateRequest,
    RequestOutputs,
    ResetDone,
)
from protocol.rows import LogprobRows, OutputRows
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.security import LOCAL, Security
from protocol.silence import SIGN_INTERVAL
from protocol.transport import HandshakeRefused
from services.frontend.engine.availability import Availability, Recovery, checked
from services.frontend.engine.cache_resets import CacheResets
from services.frontend.engine.connection import SchedulerConnection
from services.frontend.engine.ledger import RequestLedger
from services.frontend.engine.signs_of_life import CHECK_INTERVAL
from services.frontend.engine.streams import FlushQueue, RawLogprobs, RequestStream
from services.frontend.errors import APIError, invalid
from services.frontend.steps.ring import StepRing

log = logging.getLogger("runahead.frontend")

MAX_SHEDDING = 1.0
"""Seconds after a refusal for load in which no further request is sent to the scheduler, at most."""

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
    if status != 400 or param is None:
        return APIError(status, message, retry_after=finish.retry_after)
    # The log does not have the engine's text: errors of a grammar quote the grammar
    return invalid(message, param, logged=f"{param}: the engine refused the request")


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
    """Sends requests to the scheduler and groups the rows of its messages by request.

    Args:
        silence: seconds without a message, or without the answer to a sign of life, after which the scheduler is lost;
            and without a rank's answer to the scheduler after which the engine is not ready.
        patience: seconds that open requests wait for another scheduler.
        request_timeout: seconds without progress after which a request ends.
        tokenizer: digest of this frontend's tokenizer.json, to compare with the scheduler's; "": not compared.
        steps: receives the step records; None: they are not subscribed to.
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
        steps: StepRing | None = None,
    ) -> None:
        self._connection = SchedulerConnection(endpoint, security, silence, self._on_frame, self._on_lost)
        self._tokenizer = tokenizer
        self.steps = steps
        self._is_subscribed = False
        self._max_open = max_open_requests
        self._max_silence = silence
        self._request_timeout = request_timeout
        self.ledger = RequestLedger()
        self._numbers = itertools.count(1)
        self._resets = CacheResets()
        self._availability = Availability(patience)
        self._decoder: Decoder[RequestOutputs | EngineState | StepRecords | ResetDone] = Decoder(
            EngineMessage
        )
        self._overloaded_until = 0.0
        """Until then the scheduler refuses new requests for load; monotonic seconds."""
        self.num_shed = 0
        """Requests that were refused for load before they were read."""
        self.flush_queue = FlushQueue()

    @property
    def state(self) -> EngineState:
        return self._availability.state

    @property
    def recoveries(self) -> deque[Recovery]:
        """Losses and returns of the engine, the latest ones in order."""
        return self._availability.recoveries

    @property
    def ready(self) -> bool:
        """True if requests are executed now."""
        return self._availability.ready

    @property
    def draining(self) -> bool:
        return self._availability.draining

    def drain(self) -> None:
        """Refuse new requests from now on; open ones finish."""
        self._availability.draining = True
        if self.steps is not None:
            self.steps.wake_viewers()

    @property
    def num_open(self) -> int:
        return len(self.ledger)

    def check_ready(self) -> None:
        """Raises: APIError, with the reason"""
        self._availability.check()

    def check_load(self) -> None:
        """Raises: APIError, if the scheduler would certainly refuse a request for load"""
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
            await self._connection.run()
        finally:
            watch.cancel()

    # -- loss of the scheduler -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Send signs of life, and notice silence and the end of patience."""
        next_sign = 0.0
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            now = time.monotonic()
            if now >= next_sign:
                next_sign = now + SIGN_INTERVAL
                self._connection.send_sign()
            self._connection.check(now)
            if self._connection.in_doubt:
                self._availability.on_doubt(now)
            if stuck := self.ledger.stuck(now, self._request_timeout):
                why = f"the request made no progress for {self._request_timeout:g} s (--request-timeout)"
                self._fail(stuck, APIError(504, why))
            if self._availability.gives_up(now, is_connected=self._connection.is_open):
                self.fail_all(APIError(503, "the engine is gone; the request was not completed"))

    def _on_lost(self, is_expelled: bool) -> None:
        """Open requests wait for the next scheduler, and so do new ones if this one served."""
        self._is_subscribed = False
        if is_expelled:
            self.ledger.expelled()
        self.ledger.disconnected()
        self._availability.on_lost(time.monotonic())

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
        self._connection.on_state(state)
        if not self._connection.is_open:
            return
        self._availability.on_state(checked(state, self._max_silence), time.monotonic())
        self._subscribe()
        self._submit_open()

    def _subscribe(self) -> None:
        """Subscribe to step records, once per connection."""
        if self.steps is None or self._is_subscribed or not self.state.incarnation:
            return
        self._is_subscribed = True
        self.steps.on_connected()
        self._connection.send_quietly(Subscribe())

    def _submit_open(self) -> None:
        """Send what the scheduler does not have yet."""
        if not self._connection.is_open or not self._availability.executes:
            return
        before = self.ledger.resubmitted
        for message in self.ledger.submissions(self.state.incarnation, time.monotonic()):
            if not self._connection.send(message):
                return
        if (count := self.ledger.resubmitted - before) > 0:
            log.info("%d open requests were submitted again", count)

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
            if isinstance(message, EngineState):
                self._on_state(message)
                return
            if isinstance(message, StepRecords):
                if self.steps is not None:
                    self.steps.add(message, time.monotonic())
                return
            if isinstance(message, ResetDone):
                self._resets.on_done(message)
                return
            if message.incarnation != self.state.incarnation:
                log.warning("a message of another scheduler was dropped")
                return
            rows = OutputRows.from_message(message)
            self._group_logprobs(message.logprobs)
        except ProtocolError as error:  # it may have had tokens; the requests submitted again get them
            self._connection.drop(f"bad message from the scheduler: {error}; connecting again")
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
            self._connection.send_quietly(AbortRequest(numbers, self.state.incarnation))

    async def reset_prefix_cache(self, reset_running: bool) -> bool:
        """Empty the prefix cache. Return False if running requests still share blocks.

        Raises: APIError, if the scheduler does not answer
        """
        self.check_ready()
        return await self._resets.request(reset_running, self._connection.send_quietly)
