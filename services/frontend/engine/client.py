"""The open requests of a frontend, which survive a connection and move from engine to engine.

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
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace
from typing_extensions import TypedDict

from protocol.block_names import TOKEN_BYTES, extend_names
from protocol.codec import Decoder, ProtocolError, encode, pack
from protocol.requests import (
    CacheAction,
    CacheControlled,
    ControlCache,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    GenerateRequest,
    ResetPrefixCache,
)
from protocol.sampling import Pooling, SamplingParams
from protocol.security import LOCAL, Security
from services.frontend.engine.addresses import EngineAddress, follow
from services.frontend.engine.availability import NOT_CONNECTED, Recovery
from services.frontend.engine.engine import ConnectedEngine
from services.frontend.engine.engines import Engines
from services.frontend.engine.ledger import NOBODY, LedgerEntry, RequestLedger
from services.frontend.engine.streams import FlushQueue, RequestStream
from services.frontend.errors import APIError, invalid
from services.frontend.placement import Decision, Hold, LoadAhead, Move, Place, Placement, Reason
from services.frontend.steps.ring import StepRing

log = logging.getLogger("runahead.frontend")

MAX_RECOVERIES = 64
"""Losses and returns of engines that are kept for traces."""
REJECTED_PAUSE = 1.0
"""Seconds until a request that was admitted once, and for which no other engine has room, is sent again."""
MAX_MOVES = 100
"""Moves of streams that are kept for the page."""

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


NO_PROMPT = GenerateRequest(0, b"", 0, SamplingParams(1))
"""The fields that all engine requests of one HTTP request share are set in a copy of it; `submit` sets the others."""


class MoveEntry(TypedDict):
    at: float
    """Seconds since 1970."""
    request_id: str
    source: str
    target: str
    reason: str
    """lost, draining, slow or prefilled."""
    output_tokens: int
    """Tokens that the former engine had delivered."""


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
        self._security = security
        self.placement = placement or Placement(seed=os.getpid())
        self.ledger = RequestLedger(self.placement.on_ended)
        self._numbers = itertools.count(1)
        self.recoveries: deque[Recovery] = deque(maxlen=MAX_RECOVERIES)
        """Losses and returns of engines, the latest ones in order."""
        self.num_shed = 0
        """Requests that were refused for load before they were read."""
        self.decisions = Counter[tuple[str, str, str]]()
        """Decisions over all time: what was decided, the engine that it is about ("": none), and the reason."""
        self.latest_moves: deque[MoveEntry] = deque(maxlen=MAX_MOVES)
        self.flush_queue = FlushQueue()
        self.draining = False
        settings = silence, patience, security, tokenizer

        def make(address: EngineAddress) -> ConnectedEngine:
            callbacks = self.engines.on_engine, self._on_finish, self.engines.on_blocks
            return ConnectedEngine(address, self.ledger, *settings, self.recoveries, *callbacks)

        self.engines = Engines(make, self.ledger, self.placement, steps, self._settle, self._load_ahead)
        self.engines.set_addresses(addresses)

    @property
    def state(self) -> EngineState:
        """State of the engine whose sizes hold for new requests."""
        return NOT_CONNECTED if self.engines.primary is None else self.engines.primary.state

    @property
    def adapted_modules(self) -> list[str]:
        """Modules that LoRA adapters may change on every engine that may get their requests; []: not known."""
        engines = (e for e in self.engines.values() if e.identity in ("", self.engines.identity))
        known = [{*engine.state.adapted_modules} for engine in engines if engine.state.adapted_modules]
        return sorted(set[str].intersection(*known)) if known else []

    @property
    def ready(self) -> bool:
        """True if requests are executed now."""
        return not self.draining and self.engines.primary is not None and self.engines.primary.ready

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
        if self.engines.primary is None:
            raise APIError(503, "no engine is known; try again later")
        self.engines.primary.check()
        if not self.engines.primary.accepts:
            raise APIError(503, "the engines drain, and no other one takes requests; try again later")

    def check_load(self) -> None:
        """Raises: APIError, if all engines would certainly refuse a request for load"""
        now = time.monotonic()
        left = min((e.overloaded_until - now for e in self.engines.values() if e.accepts), default=0.0)
        if left > 0:
            self.num_shed += 1
            raise APIError(429, "the server is overloaded; try again later", retry_after=left)

    async def run(self, source: str | None = None) -> None:
        """Connect to the engines and read until cancelled. The open requests of one that is lost go on at another one,
        or at its next scheduler, from the tokens that were delivered.

        Args:
            source: file that lists the engines, or dns://NAME:PORT; None: they stay those of `addresses`.

        Raises: HandshakeRefused, if the only engine, or this frontend, refuses the connection
        """
        if source is None:
            await self.engines.run(self._check)
            return
        following = follow(source, self._security, self.engines.set_addresses)
        running = [asyncio.create_task(self.engines.run(self._check)), asyncio.create_task(following)]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    def _check(self, now: float) -> None:
        """Notice engines that do not come back and requests without progress. `now`: monotonic seconds."""
        for engine in self.engines.values():
            if engine.watch(now):
                gone = APIError(503, "the engine is gone; the request was not completed")
                others = any(other.accepts for other in self.engines.values())
                streams = self.ledger.owned(engine.name) + ([] if others else self.ledger.waiting)
                self.fail([entry.stream for entry in streams], gone)
            self.engines.report(engine)
        self.engines.forget_unlisted()
        if stuck := self.ledger.stuck(now, self._request_timeout):
            why = f"the request made no progress for {self._request_timeout:g} s (--request-timeout)"
            self.fail(stuck, APIError(504, why))
        self.engines.elect()
        self._settle()

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(
        self,
        stream: RequestStream,
        token_ids: list[int],
        params: SamplingParams,
        shared: GenerateRequest,
        identity: str = "",
    ) -> None:
        """Send a request; its outputs arrive in `stream`. If it has output already, the request goes on from there.

        Args:
            token_ids: the prompt.
            shared: the request without number, prompt and parameters.
            identity: identity of the engines that made the output which `stream` has.

        Raises: APIError, when no engine can take a request now
        """
        self.check_ready()
        if len(self.ledger) >= self._max_open:
            raise APIError(429, f"{self._max_open} requests are open already; try again later")
        stream.number = self._next_number()
        prompt = {"token_ids": pack(token_ids), "num_prompt_tokens": len(token_ids)}
        message = replace(shared, number=stream.number, params=params, **prompt)
        try:  # the scheduler would expel this frontend, with all its streams
            _requests.decode(encode(message))
        except (ProtocolError, ValueError) as error:
            raise APIError(400, f"the request exceeds a limit of the engine: {error}") from None
        now = time.monotonic()
        entry = self.ledger.open(stream, message, now, identity)
        self.placement.advance(now)
        self._place(entry)
        if entry.engine == NOBODY:
            self.decisions["hold", NOBODY, "not_ready"] += 1
        log.debug(
            "request accepted: request_id=%s number=%d prompt_tokens=%d engine=%s",
            shared.request_id, stream.number, len(token_ids), entry.engine,
        )  # fmt: skip

    def _place(self, entry: LedgerEntry) -> None:
        """Send a request that has no owner to the engine that placement chooses, or let it wait.

        Raises: APIError, if no engine takes it; it is closed then
        """
        match self._decide(entry):
            case Place(engine=name, reason=reason):
                self.decisions["place", name, reason] += 1
                self.ledger.assign(entry, name)
                self.engines[name].submit_open()
            case Hold():
                pass
            case refused:
                self.decisions["refuse", NOBODY, "no_engine"] += 1
                self.ledger.close(entry.request.number)
                why = [f"engine {name} refuses it: {text}" for name, text in entry.refusals.items()]
                message = "; ".join([refused.message, *why, "try again later"])
                raise APIError(503, message, retry_after=refused.retry_after, logged=refused.message)

    def _decide(self, entry: LedgerEntry, *refused: str) -> Decision:
        """Return what placement decides for a request, in which the fields that depend on its engine are set.

        Args:
            refused: engines that have no room for it.
        """
        request, identity = entry.request, entry.identity or self.engines.identity
        excluded, for_good = (*entry.refusals, *refused), bool(entry.num_admissions and entry.refusals)
        decision = self.placement.place(entry.key, request.token_ids, request.salt, identity, excluded, for_good)
        if isinstance(decision, Place):
            entry.set_kv_peers(self._kv_peers(decision.holder))
            goes_on = request.pooling is Pooling.NONE and not entry.refusals  # the prompt is all of an embedding
            entry.only_prompt = decision.reason is Reason.PREFILL and goes_on
        return decision

    def _settle(self) -> None:
        """Place the requests that have no owner, move those that must leave theirs, and send what is unsent."""
        for entry in self.ledger.waiting:
            # Sent meanwhile, as an engine was lost; or no engine had room for it
            if entry.engine != NOBODY or entry.held_until > time.monotonic():
                continue
            try:
                self._place(entry)
            except APIError as error:
                entry.stream.finish(error)
        for move in self.placement.moves():
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
        entry.set_kv_peers(self._kv_peers(move.source))
        entry.only_prompt = False
        self.ledger.move(number, self._next_number(), move.target, is_fault=move.reason is Reason.LOST)
        self.decisions["move", move.source, move.reason] += 1
        self.latest_moves.append(
            {
                "at": time.time(),
                "request_id": entry.request.request_id,
                "source": move.source,
                "target": move.target,
                "reason": move.reason,
                "output_tokens": len(entry.stream.output),
            }
        )
        log.debug(
            "request moved: request_id=%s number=%d tokens=%d from=%s to=%s: %s",
            entry.request.request_id, entry.request.number, len(entry.stream.output), move.source, move.target,
            move.reason,
        )  # fmt: skip

    def _load_ahead(self, ahead: LoadAhead) -> None:
        """Let an engine fetch the blocks of a prompt that are complete, before its stream moves there."""
        entry, target = self.ledger.with_key(ahead.key), self.engines.get(ahead.target)
        if entry is None or not entry.only_prompt or target is None:
            return
        if target.state.loads_ahead and (peers := self._kv_peers(entry.engine)):
            names, request = list[bytes](), entry.request
            tokens = request.token_ids[: ahead.num_tokens * TOKEN_BYTES]
            extend_names(names, request.salt, tokens, target.state.block_size)
            message = ControlCache(0, CacheAction.LOAD, names=b"".join(names), kv_peers=peers)
            target.connection.send_quietly(message)

    def _on_finish(self, engine: ConnectedEngine, finish: Finish) -> Finish | APIError | None:
        """Return the end of a request for its client. None: it goes on, as its prompt is computed, or another engine
        admits it, now or later."""
        if (entry := self.ledger.entry(finish.number)) is None:
            return finish
        if entry.only_prompt and finish.reason is FinishReason.LENGTH:
            if len(entry.stream.output) >= entry.request.params.max_tokens:
                return finish
            if (move := self.placement.prefilled(entry.key)) is not None:
                self._move(move)
            return finish if move is None else None
        if finish.reason is FinishReason.ERROR and engine.state.phase is EnginePhase.FAILED:
            if not any(e.ready and e.identity == entry.identity for e in self.engines.values()):
                return finish
            self._take_from_owner(entry, is_fault=True)
            return None
        if finish.reason not in (FinishReason.REJECTED, FinishReason.INVALID):
            return finish
        entry.num_admissions -= 1  # the next one may refuse it, too
        if finish.reason is FinishReason.INVALID:
            if not (entry.num_admissions or finish.by_settings):
                return finish
            alike = [e for e in self.engines.values() if not entry.num_admissions and e.settings == engine.settings]
            entry.refusals |= {e.name: finish.message for e in (engine, *alike)}
        else:
            entry.num_rejections += 1
            self.engines.report(engine)
        # It has the prompt now, which would attract it again
        decision = self._decide(entry, engine.name) if len(self.engines) > entry.num_rejections else None
        if isinstance(decision, Place):
            self.ledger.move(finish.number, self._next_number(), decision.engine, is_fault=False)
            return None
        if not entry.num_admissions:
            if finish.reason is FinishReason.REJECTED:
                return finish
            why = "; ".join(dict.fromkeys(entry.refusals.values()))
            if isinstance(decision, Hold):
                return APIError(503, f"{why}; an engine with other settings is not ready; try again later")
            return replace(finish, message=why)
        self._take_from_owner(entry, is_fault=False)
        if finish.reason is FinishReason.REJECTED:
            entry.num_rejections, entry.held_until = 0, time.monotonic() + REJECTED_PAUSE
        return None

    def _take_from_owner(self, entry: LedgerEntry, is_fault: bool) -> None:
        """Let a request wait for an engine."""
        self.placement.on_ended(entry.key)
        self.ledger.move(entry.request.number, self._next_number(), NOBODY, is_fault)

    def _kv_peers(self, engine: str) -> list[str]:
        """Return where workers fetch KV blocks of an engine; []: nowhere. The workers of a lost scheduler may live."""
        found = self.engines.get(engine)
        return [] if found is None else found.state.kv_peers

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
        self.fail(list(self.ledger.streams.values()), error)

    def fail(self, streams: list[RequestStream], error: APIError) -> None:
        """End open requests with `error`."""
        self.abort(streams)
        for stream in streams:
            stream.finish(error)

    async def reset_prefix_cache(self, reset_running: bool) -> bool:
        """Empty the prefix caches. Return False if running requests still share blocks.

        Raises: APIError, if a scheduler does not answer
        """
        answers = await self._ask_engines(lambda _, number: ResetPrefixCache(number, reset_running))
        return all(done.complete for done in answers.values())

    async def control_cache(
        self, make: Callable[[EngineState, int], ControlCache], is_drop: bool = False
    ) -> dict[str, CacheControlled]:
        """Send a request of an administrator to all engines. Return the answers by the engines' names.

        Args:
            make: returns the request for an engine, with a number.
            is_drop: it must reach every engine (dropped block, docs/invariants.md).

        Raises: APIError, if a scheduler does not answer
        """
        self.check_ready()
        if is_drop and (lost := [e.name for e in self.engines.values() if not e.connection.is_open]):
            raise APIError(503, f"engine {lost[0]} is not connected and may keep the blocks; try again when it is back")
        if old := [e.name for e in self.engines.values() if e.connection.is_open and not e.state.controls_cache]:
            raise APIError(503, f"engine {old[0]} is of an older version, which knows no pins and drops")
        asked = {engine: engine.state.incarnation for engine in self.engines.values()}
        answers = await self._ask_engines(make)
        changed = [e.name for e, number in asked.items() if not e.connection.is_open or e.state.incarnation != number]
        if is_drop and changed:  # its next scheduler loads blocks that another engine had not dropped yet
            raise APIError(503, f"engine {changed[0]} was lost meanwhile and may have the blocks again; try again")
        return answers

    async def _ask_engines(self, make: Callable[[EngineState, int], msgspec.Struct]) -> dict[str, Any]:
        """Raises: APIError"""
        self.check_ready()
        engines = [engine for engine in self.engines.values() if engine.connection.is_open]
        asked = (engine.connection.ask(partial(make, engine.state)) for engine in engines)
        return dict(zip((engine.name for engine in engines), await asyncio.gather(*asked), strict=True))
