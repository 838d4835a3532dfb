"""The engines of a frontend, and its open requests, which survive a connection and move from engine to engine.

Rules (docs/invariants.md):

- One owner: at any time one engine owns a request. What a former owner still sends carries a number that is not open.
- Moved stream: a request goes on at another engine from its delivered tokens, as at a scheduler that was restarted. The
  other engine has the same identity, so the tokens are those that the former owner would have sent.
"""

import asyncio
import itertools
import logging
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.codec import Decoder, ProtocolError, encode, pack
from protocol.requests import EngineState, Finish, FinishReason, GenerateRequest
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.security import LOCAL, Security
from protocol.silence import SIGN_INTERVAL
from protocol.transport import HandshakeRefused
from services.frontend.engine.addresses import EngineAddress
from services.frontend.engine.availability import NOT_CONNECTED, Recovery
from services.frontend.engine.engine import ConnectedEngine
from services.frontend.engine.ledger import NOBODY, LedgerEntry, RequestLedger
from services.frontend.engine.signs_of_life import CHECK_INTERVAL
from services.frontend.engine.streams import FlushQueue, RequestStream
from services.frontend.errors import APIError, invalid
from services.frontend.placement import Hold, Move, Place, Placement, Reason
from services.frontend.steps.ring import StepRing

log = logging.getLogger("runahead.frontend")

MAX_RECOVERIES = 64
"""Losses and returns of engines that are kept for traces."""
MAX_MOVES = 100
"""Moves of streams that are kept for the page."""
REFUSED_PAUSE = 10.0
"""Seconds until an engine that was refused is connected to again. Another one may be in its place then."""

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


class StreamMove(NamedTuple):
    at: float
    """Seconds since 1970."""
    request_id: str
    source: str
    target: str
    reason: Reason
    output_tokens: int
    """Tokens that were delivered before."""


class EngineClient:
    """
    Args:
        addresses: engines to begin with.
        silence: seconds without a message, or without the answer to a sign of life, after which a scheduler is lost;
            and without a rank's answer to the scheduler after which an engine is not ready.
        patience: seconds that open requests wait for another scheduler.
        request_timeout: seconds without progress after which a request ends.
        tokenizer: digest of this frontend's tokenizer.json, to compare with the schedulers'; "": not compared.
        steps: receives the step records of one engine; None: they are not subscribed to.
        placement: chooses engines; None: by the default policy.
    """

    def __init__(
        self,
        addresses: Sequence[EngineAddress],
        max_open_requests: int,
        silence: float,
        patience: float,
        request_timeout: float,
        security: Security = LOCAL,
        tokenizer: str = "",
        steps: StepRing | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.steps = steps
        self._max_open = max_open_requests
        self._request_timeout = request_timeout
        self._placement = placement or Placement(seed=os.getpid())
        self.ledger = RequestLedger(self._placement.on_ended)
        self._numbers = itertools.count(1)
        self.recoveries: deque[Recovery] = deque(maxlen=MAX_RECOVERIES)
        """Losses and returns of engines, the latest ones in order."""
        self.num_shed = 0
        """Requests that were refused for load before they were read."""
        self.decisions = Counter[tuple[str, str, str]]()
        """Decisions over all time: what was decided, the engine that it is about ("": none), and the reason."""
        self.latest_moves: deque[StreamMove] = deque(maxlen=MAX_MOVES)
        self.flush_queue = FlushQueue()
        self.draining = False
        self._settings = silence, patience, security, tokenizer
        self.engines: dict[str, ConnectedEngine] = {}
        """By name. One that is listed no longer stays until it owns no request."""
        self._connections: dict[str, asyncio.Task[None]] = {}
        self._refused: asyncio.Future[None] | None = None
        """Set while connections are made: ends with the refusal of the only engine."""
        self._primary: ConnectedEngine | None = None
        """The engine whose sizes hold for new requests."""
        self._identity = ""
        """Identity of the engines that get new requests; "": that of the first one that serves."""
        self.set_engines(addresses)

    @property
    def state(self) -> EngineState:
        """State of the engine whose sizes hold for new requests."""
        return NOT_CONNECTED if self._primary is None else self._primary.state

    @property
    def ready(self) -> bool:
        """True if requests are executed now."""
        return not self.draining and self._primary is not None and self._primary.ready

    def drain(self) -> None:
        """Refuse new requests from now on; open ones finish."""
        self.draining = True
        if self.steps is not None:
            self.steps.wake_viewers()

    @property
    def num_open(self) -> int:
        return len(self.ledger)

    def check_ready(self) -> None:
        """Raises: APIError, with the reason"""
        if self.draining:
            raise APIError(503, "the server is stopping; no new requests are taken")
        if self._primary is None:
            raise APIError(503, "no engine is known; try again later")
        self._primary.availability.check()
        if not self._primary.accepts:
            raise APIError(503, "the engines drain, and no other one takes requests; try again later")

    def check_load(self) -> None:
        """Raises: APIError, if all engines would certainly refuse a request for load"""
        now = time.monotonic()
        left = min((e.overloaded_until - now for e in self.engines.values() if e.accepts), default=0.0)
        if left > 0:
            self.num_shed += 1
            raise APIError(429, "the server is overloaded; try again later", retry_after=left)

    async def run(self) -> None:
        """Connect to the engines and read until cancelled. The open requests of one that is lost go on at another one,
        or at its next scheduler, from the tokens that were delivered.

        Raises: HandshakeRefused, if the only engine, or this frontend, refuses the connection
        """
        self._refused = asyncio.get_running_loop().create_future()
        for engine in self.engines.values():
            self._connect(engine)
        watch = asyncio.create_task(self._watch())
        try:
            await self._refused
        finally:
            self._refused = None
            for task in (watch, *self._connections.values()):
                task.cancel()
            await asyncio.wait({watch, *self._connections.values()})

    # -- engines that come and go --------------------------------------------------------------------------------

    def set_engines(self, addresses: Sequence[EngineAddress]) -> None:
        """Connect to the engines of this list. The streams of those that it no longer has move to others."""
        listed = {address.name: address for address in addresses}
        for name, engine in self.engines.items():
            if name not in listed and engine.is_listed:
                log.info("engine %s is listed no longer: %d streams", name, len(self.ledger.owned(name)))
                engine.is_listed = False
                engine.drain(True)
        for name, address in listed.items():
            known = self.engines.get(name)
            if known is not None and known.address == address:
                if not known.is_listed:
                    known.is_listed = True
                    known.drain(False)
                continue
            if known is not None:  # its requests wait for the scheduler at the other endpoint
                self._disconnect(known)
            engine = self.engines[name] = ConnectedEngine(
                *(address, self.ledger, *self._settings, self.recoveries),
                *(self._on_engine, self._on_finish),
            )
            self._report(engine)
            if self._refused is not None:
                self._connect(engine)
        self._elect()
        self._settle()

    def _connect(self, engine: ConnectedEngine) -> None:
        self._connections[engine.name] = asyncio.create_task(self._run_engine(engine))

    async def _run_engine(self, engine: ConnectedEngine) -> None:
        while True:
            try:
                await engine.connection.run()
            except HandshakeRefused as error:
                if len(self.engines) == 1:
                    if self._refused is not None and not self._refused.done():
                        self._refused.set_exception(error)
                    return
                log.error("engine %s is not used: %s", engine.name, error)
                engine.on_refused(str(error))
            except Exception as error:
                if self._refused is not None and not self._refused.done():
                    self._refused.set_exception(error)
                return
            await asyncio.sleep(REFUSED_PAUSE)

    def _disconnect(self, engine: ConnectedEngine) -> None:
        if (task := self._connections.pop(engine.name, None)) is not None:
            task.cancel()
        self.ledger.disconnected(engine.name)

    def _report(self, engine: ConnectedEngine) -> None:
        self._placement.advance(time.monotonic())
        self._placement.on_engine(engine.name, engine.report())

    def _elect(self) -> None:
        """Choose the engine whose sizes hold for new requests. Engines with other weights get none, unless no engine
        that stays has the weights of before."""
        engines = [engine for engine in self.engines.values() if engine.is_listed]
        staying = [engine for engine in engines if not engine.draining]
        keeps = any(engine.identity in ("", self._identity) for engine in staying)
        if self._identity and not keeps and any(engine.ready for engine in staying):
            log.warning("new requests go to engines with other weights from now on")
            self._identity = ""

        def rank(engine: ConnectedEngine) -> tuple[bool, bool, bool]:
            fits = not self._identity or engine.identity in ("", self._identity)
            return fits and engine.ready, fits and engine.accepts, not engine.refusal

        best = max(engines, key=rank, default=None)
        if best is not None and best.ready and not self._identity:
            self._identity = best.identity
        if best is not self._primary and self.steps is not None:
            if self._primary is not None:
                self._primary.follow_steps(None)
            if best is not None:
                best.follow_steps(self.steps)
        self._primary = best

    def _on_engine(self, engine: ConnectedEngine) -> None:
        """An engine has sent its state, or was lost."""
        self._report(engine)
        primary = self._primary
        if primary is None or not primary.ready or primary.identity != self._identity:
            self._elect()
        self._settle()

    def drain_engine(self, name: str, draining: bool = True) -> None:
        """Let the streams of an engine move to others, and send it no new ones; or take that back.

        Raises: APIError
        """
        engine = self.find(name)
        if draining and not any(e.ready for e in self.engines.values() if e is not engine):
            raise APIError(409, f"engine {name} is the only one that serves; start another one first")
        engine.drain(draining)
        self._report(engine)
        self._elect()
        self._settle()

    def fail_engine(self, name: str, why: str) -> None:
        """End the requests that an engine owns."""
        self._fail([entry.stream for entry in self.ledger.owned(name)], APIError(503, why))

    def find(self, name: str) -> ConnectedEngine:
        """Raises: APIError"""
        if (engine := self.engines.get(name)) is None:
            known = ", ".join(self.engines)
            raise APIError(404, f"there is no engine {name[:100]!r}; the engines are {known}")
        return engine

    async def _watch(self) -> None:
        """Send signs of life, and notice silence and the end of patience."""
        next_sign = 0.0
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            now = time.monotonic()
            if now >= next_sign:
                next_sign = now + SIGN_INTERVAL
                for engine in self.engines.values():
                    engine.connection.send_sign()
            self._check(now)

    def _check(self, now: float) -> None:
        for engine in list(self.engines.values()):
            if engine.watch(now):
                gone = APIError(503, "the engine is gone; the request was not completed")
                others = any(other.accepts for other in self.engines.values())
                streams = self.ledger.owned(engine.name) + ([] if others else self.ledger.waiting)
                self._fail([entry.stream for entry in streams], gone)
            self._report(engine)
            if not engine.is_listed and not self.ledger.owned(engine.name):
                self._disconnect(engine)
                del self.engines[engine.name]
                self._placement.on_engine_removed(engine.name)
                log.info("engine %s is forgotten: it has no streams", engine.name)
        if stuck := self.ledger.stuck(now, self._request_timeout):
            why = f"the request made no progress for {self._request_timeout:g} s (--request-timeout)"
            self._fail(stuck, APIError(504, why))
        self._elect()
        self._settle()

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(
        self,
        stream: RequestStream,
        prompt: list[int],
        params: SamplingParams,
        context: RequestContext,
        identity: str = "",
    ) -> None:
        """Send a request; its outputs arrive in `stream`. If it has output already, the request goes on from there.

        Args:
            identity: identity of the engines that made the output which `stream` has.

        Raises: APIError, when no engine can take a request now
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
        now = time.monotonic()
        entry = self.ledger.open(stream, message, now, identity)
        self._placement.advance(now)
        self._place(entry)
        if entry.engine == NOBODY:
            self.decisions["hold", NOBODY, "not_ready"] += 1
        log.debug(
            "request accepted: request_id=%s number=%d prompt_tokens=%d engine=%s",
            context.request_id, stream.number, len(prompt), entry.engine,
        )  # fmt: skip

    def _place(self, entry: LedgerEntry) -> None:
        """Send a request that has no owner to the engine that placement chooses, or let it wait.

        Raises: APIError, if no engine takes it; it is closed then
        """
        request, identity = entry.request, entry.identity or self._identity
        match self._placement.place(entry.key, request.token_ids, request.cache_salt, identity):
            case Place(engine=name, reason=reason):
                self.decisions["place", name, reason] += 1
                self.ledger.assign(entry, name)
                self.engines[name].submit_open()
            case Hold():
                pass
            case refused:
                self.decisions["refuse", NOBODY, "no_engine"] += 1
                self.ledger.close(request.number)
                raise APIError(503, f"{refused.message}; try again later", retry_after=refused.retry_after)

    def _settle(self) -> None:
        """Place the requests that have no owner, move those that must leave theirs, and send what is unsent."""
        for entry in self.ledger.waiting:
            if entry.engine != NOBODY:  # sent meanwhile, as an engine was lost
                continue
            try:
                self._place(entry)
            except APIError as error:
                self._end(entry.stream, error)
        for move in self._placement.moves():
            self._move(move)
        for name in self.ledger.owners_of_unsent():
            if (engine := self.engines.get(name)) is not None:
                engine.submit_open()

    def _move(self, move: Move) -> None:
        if (entry := self.ledger.with_key(move.key)) is None:
            return
        source, number = self.engines.get(move.source), entry.request.number
        if source is not None:
            source.abort([number])
        self.ledger.move(number, self._next_number(), move.target, is_fault=move.reason is Reason.LOST)
        self.decisions["move", move.source, move.reason] += 1
        self.latest_moves.append(
            StreamMove(
                time.time(),
                entry.request.request_id,
                move.source,
                move.target,
                move.reason,
                len(entry.stream.output),
            )
        )
        log.debug(
            "request moved: request_id=%s number=%d tokens=%d from=%s to=%s: %s",
            entry.request.request_id, entry.request.number, len(entry.stream.output), move.source, move.target,
            move.reason,
        )  # fmt: skip

    def _on_finish(self, engine: ConnectedEngine, finish: Finish) -> bool:
        """Return True if a request that an engine did not admit was placed at another one."""
        if finish.reason is not FinishReason.REJECTED or len(self.engines) == 1:
            return False
        entry = self.ledger.entry(finish.number)
        if entry is None or entry.num_rejections >= len(self.engines):
            return False
        entry.num_rejections += 1
        self._report(engine)
        request, identity = entry.request, entry.identity or self._identity
        match self._placement.place(entry.key, request.token_ids, request.cache_salt, identity):
            case Place(engine=name) if name != engine.name:
                self.ledger.move(finish.number, self._next_number(), name, is_fault=False)
                return True
        return False

    def _next_number(self) -> int:
        """Return a uint32 that no open request has, also after the counter has wrapped around."""
        while (number := next(self._numbers) & 0xFFFFFFFF) in self.ledger.streams:
            pass
        return number

    def abort(self, streams: Iterable[RequestStream]) -> None:
        """End requests whose outputs are no longer needed. Those that have ended are ignored."""
        numbers = defaultdict[str, list[int]](list)
        for stream in streams:
            if (entry := self.ledger.close(stream.number)) is not None:
                numbers[entry.engine].append(stream.number)
        for name, closed in numbers.items():
            if (engine := self.engines.get(name)) is not None:
                engine.abort(closed)

    def fail_all(self, error: APIError) -> None:
        """End every open request with `error`."""
        self._fail(list(self.ledger.streams.values()), error)

    def _fail(self, streams: list[RequestStream], error: APIError) -> None:
        self.abort(streams)
        for stream in streams:
            self._end(stream, error)

    @staticmethod
    def _end(stream: RequestStream, error: APIError) -> None:
        stream.end = error
        stream.response.mark_due(stream)

    async def reset_prefix_cache(self, reset_running: bool) -> bool:
        """Empty the prefix caches. Return False if running requests still share blocks.

        Raises: APIError, if a scheduler does not answer
        """
        self.check_ready()
        engines = [engine for engine in self.engines.values() if engine.connection.is_open]
        done = [engine.resets.request(reset_running, engine.connection.send_quietly) for engine in engines]
        return all(await asyncio.gather(*done))
