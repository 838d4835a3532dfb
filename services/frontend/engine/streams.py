"""The path of outputs from a step's message to the bytes of HTTP responses. No sockets.

1. The engine client decodes a message; the ledger appends the token of each row to the `RequestStream` of its request.
2. When all messages that have arrived are decoded, one flush serves every `ResponseStream` with new outputs. In the
   first pass each of them feeds its requests, which return bytes. In the second pass the bytes are written.

A response whose connection is full is not fed: its outputs wait as tokens and are joined into one write later.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

from protocol.requests import Finish, FinishReason
from services.frontend.errors import APIError, internal_error

log = logging.getLogger("runahead.frontend")

MAX_TOKENS_PER_FLUSH = 1024
"""Tokens of one response that one flush reads, a few milliseconds of work; the next flush reads the rest."""
MAX_UNWRITTEN = 256
"""Responses whose bytes are made before the first of them is written."""


class RawLogprobs(NamedTuple):
    """Log-probabilities at one position of a request's sequence, as the engine sends them."""

    position: int
    """Counted from the first token of the prompt."""
    token_rank: int
    """Rank of the token at this position by its probability; 1 is the most likely."""
    token_ids: list[int]
    """The token at this position, then the most likely tokens in descending order."""
    values: list[float]
    """Log-probabilities of `token_ids`; minus infinity is possible."""


class RequestStream(ABC):
    """Outputs of one open engine request that arrived since the last flush. Subclasses turn them into bytes."""

    __slots__ = (
        "duplicates", "end", "has_ended", "interval", "is_due", "is_resumed", "num_cached", "number", "output",
        "response", "tokens",
    )  # fmt: skip

    def __init__(self, response: "ResponseStream") -> None:
        response.num_open += 1
        self.response = response
        self.number = 0
        """Set when the request is submitted."""
        self.tokens: list[int] = []
        """Output tokens that are not fed yet."""
        self.duplicates = 0
        """Tokens that were dropped because they had arrived before."""
        self.num_cached: int | None = None
        """Prompt tokens that the prefix cache held; None: not known yet."""
        self.is_resumed = False
        """True if a scheduler has it that was not the first one."""
        self.output: list[int] = []
        """Every output token that has arrived, each once and in order: what a scheduler needs to continue."""
        self.end: Finish | APIError | None = None
        self.interval = 1
        """Number of tokens that make this request due. The first token does not wait for others."""
        self.is_due = False
        """True if the next flush feeds this request."""
        self.has_ended = False
        """Set by `feed` when it has returned the last bytes; nothing is fed after that."""

    def finish(self, end: Finish | APIError) -> None:
        """Feed the end behind the outputs that have arrived."""
        self.end = end
        self.response.has_failed |= isinstance(end, APIError) or end.reason is FinishReason.ERROR
        self.response.mark_due(self)

    @abstractmethod
    def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
        """Take the next outputs, in order. Return the bytes to write; a response that is not streamed has none. `now`:
        monotonic seconds.

        Raises: APIError, if the request or its answer failed
        """

    @abstractmethod
    def add_logprobs(self, logprobs: RawLogprobs) -> None:
        """Store log-probabilities. Those of an output token come before the token is fed."""

    def add_embedding(self, values: bytes) -> None:
        """Store an embedding, float32[hidden size], which only a request for one has."""
        self.response.fail(APIError(500, "the engine sent an embedding in place of text"))


class Sink(Protocol):
    """The connection that a streamed response is written to."""

    is_full: bool
    on_writable: Callable[[], None] | None
    """Called when the connection is no longer full."""

    @property
    def write(self) -> Callable[[bytes], None]: ...


class FlushQueue:
    """Responses with new outputs, flushed together in one callback of the event loop.

    A callback per response, or a system call between the work for two responses, takes more time in total. So does
    each object that a token's path touches: the memory of other streams has displaced it from the caches since the last
    step. Hence `__slots__` along this path.
    """

    def __init__(self) -> None:
        self._queue: list[ResponseStream] = []

    def add(self, response: "ResponseStream") -> None:
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queue.append(response)

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        for begin in range(0, len(queue), MAX_UNWRITTEN):
            batch, now = queue[begin : begin + MAX_UNWRITTEN], time.monotonic()
            ready = [(response, data) for response in batch if (data := response.flush(now))]
            for response, data in ready:
                try:
                    response.write(data)
                except Exception:
                    log.exception("a response was not written: request_id=%s", response.request_id)


def _discard(data: bytes) -> None:
    pass


class ResponseStream:
    """Reads the outputs of all requests of one HTTP response."""

    __slots__ = (
        "_due", "_error", "_interval", "_is_queued", "_queue", "_sink", "_waiter", "_wants_first", "engines",
        "has_failed", "num_open", "request_id", "write",
    )  # fmt: skip

    def __init__(self, queue: FlushQueue, request_id: str = "", interval: int = 1) -> None:
        """`request_id`: of the HTTP request, for logs. `interval`: tokens of a request that are fed together, after its
        first one and before its end."""
        self.request_id = request_id
        self._queue, self._interval = queue, interval
        self._due: list[RequestStream] = []
        self._error: APIError | None = None
        self._is_queued = False
        self._sink: Sink | None = None
        self._waiter: asyncio.Future[bytes] | None = None
        """Set while a task waits in `first` or `last`; outputs are read only then."""
        self._wants_first = False
        self.engines: list[str] = []
        """Names of the engines that its requests were placed on, in this order."""
        self.num_open = 0
        """Requests of this response that have not ended."""
        self.has_failed = False
        """One of its requests ended with an error, which ends the others soon."""
        self.write: Callable[[bytes], None] = _discard

    def mark_due(self, stream: RequestStream) -> None:
        """Feed `stream` at the next flush."""
        if not stream.is_due:
            stream.is_due = True
            self._due.append(stream)
            if not self._is_queued:  # as `_schedule`, without a call per token
                self._is_queued = True
                self._queue.add(self)

    def fail(self, error: APIError) -> None:
        """End the response with `error` at the next flush. Outputs that wait are dropped."""
        self._error = error
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._queue.add(self)

    async def first(self) -> bytes:
        """Wait for the first outputs and return their bytes. Reading then pauses until `last`.

        Raises: APIError, as `last`
        """
        return await self._wait(wants_first=True)

    async def last(self, sink: Sink | None = None) -> bytes:
        """Write outputs to `sink` as they arrive, until every request has ended. Return the bytes still to be written.

        Raises: APIError, if one request failed, or `fail` was called
        """
        if sink is None:
            return await self._wait(wants_first=False)
        self._sink, self.write, sink.on_writable = sink, sink.write, self._schedule
        try:
            return await self._wait(wants_first=False)
        finally:
            self._sink, self.write, sink.on_writable = None, _discard, None

    async def _wait(self, wants_first: bool) -> bytes:
        self._waiter, self._wants_first = asyncio.get_running_loop().create_future(), wants_first
        if self._due or self._error is not None:
            self._schedule()
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def flush(self, now: float) -> bytes:
        """Feed the requests that are due. Return the bytes of one write; "" if there is nothing to write now."""
        self._is_queued = False
        waiter, sink = self._waiter, self._sink
        is_held = sink is not None and sink.is_full and self._error is None  # it stays full if its client has left
        if waiter is None or waiter.done() or is_held:
            return b""
        due, self._due = self._due, []
        parts, room = [], MAX_TOKENS_PER_FLUSH
        try:
            if self._error is not None:
                raise self._error
            for stream in due:
                tokens, end = stream.tokens, stream.end
                if stream.has_ended:
                    continue
                if len(tokens) > room:
                    self._due.append(stream)
                    if not room:
                        continue
                    tokens, stream.tokens, end = tokens[:room], tokens[room:], None
                else:
                    stream.tokens, stream.is_due, stream.interval = [], False, self._interval
                room -= len(tokens)
                if isinstance(end, APIError):
                    raise end
                parts.append(stream.feed(tokens, end, now))
                self.num_open -= stream.has_ended
        except Exception as error:
            if not isinstance(error, APIError):
                log.exception("a response failed with a bug: request_id=%s", self.request_id)
                error = internal_error()
            waiter.set_exception(error)
            return b""
        if self._due:
            self._schedule()
        data = b"".join(parts)
        if self.num_open and not self._wants_first:
            return data
        waiter.set_result(data)
        return b""
