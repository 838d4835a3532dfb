"""A frontend's open requests and its engines, as endpoints use them."""

import asyncio
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from protocol.codec import Decoder, ProtocolError, encode, pack
from protocol.requests import (
    CacheAction,
    CacheControlled,
    ControlCache,
    EngineState,
    Finish,
    FinishReason,
    GenerateRequest,
)
from protocol.sampling import SamplingParams
from protocol.security import LOCAL, Security
from services.frontend.engine.addresses import EngineAddress, follow
from services.frontend.engine.availability import NOT_CONNECTED, Recovery
from services.frontend.engine.engine import ConnectedEngine
from services.frontend.engine.engines import Engines
from services.frontend.engine.ledger import RequestLedger
from services.frontend.engine.owners import Owners
from services.frontend.engine.streams import FlushQueue, RequestStream
from services.frontend.errors import APIError, invalid
from services.frontend.placement import Placement
from services.frontend.steps.ring import StepRing

log = logging.getLogger("runahead.frontend")

MAX_RECOVERIES = 64
"""Losses and returns of engines that are kept for traces."""

_requests: Decoder[GenerateRequest] = Decoder(GenerateRequest)
_STATUSES = {FinishReason.REJECTED: 429, FinishReason.INVALID: 400, FinishReason.ABORT: 503}


def failure(finish: Finish, param: str | None = None) -> APIError | None:
    """Return the error for the client if the request failed, else None. `param`: the field of the body that constrains
    the output. The error names it if the engine finds it invalid."""
    if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return None
    status = _STATUSES.get(finish.reason, 500)
    message = finish.message or "the request was not completed"
    if status != 400 or param is None or finish.by_settings:
        return APIError(status, message, retry_after=finish.retry_after)
    # The log does not have the engine's text: errors of a grammar quote the grammar
    return invalid(message, param, logged=f"{param}: the engine refused the request")


NO_PROMPT = GenerateRequest(0, b"", 0, SamplingParams(1))
"""The fields that all engine requests of one HTTP request share are set in a copy of it; `submit` sets the others."""


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
        self.ledger = RequestLedger(self.placement.on_ended, self.placement.forget_refusals)
        self.recoveries: deque[Recovery] = deque(maxlen=MAX_RECOVERIES)
        """Losses and returns of engines, the latest ones in order."""
        self.num_shed = 0
        """Requests that were refused for load before they were read."""
        self.flush_queue = FlushQueue()
        self.draining = False
        settings = silence, patience, security, tokenizer

        def make(address: EngineAddress) -> ConnectedEngine:
            callbacks = self.engines.on_engine, self.owners.on_finish, self.owners.on_blocks
            return ConnectedEngine(address, self.ledger, *settings, self.recoveries, *callbacks)

        self.engines = Engines(make, self.ledger, self.placement, steps, lambda: self.owners.settle())
        self.owners = Owners(self.engines, self.ledger, self.placement)
        self.engines.set_addresses(addresses)

    @property
    def state(self) -> EngineState:
        """State of the engine whose sizes hold for new requests."""
        return NOT_CONNECTED if self.engines.primary is None else self.engines.primary.state

    @property
    def adapted_modules(self) -> list[str]:
        """Modules that LoRA adapters may change on every engine that may get their requests; []: not known."""
        fitting = filter(self.engines.fits, self.engines.values())
        known = [{*engine.state.adapted_modules} for engine in fitting if engine.state.adapted_modules]
        return sorted(set[str].intersection(*known)) if known else []

    @property
    def scheduling_policies(self) -> set[str]:
        """Scheduling policies of the engines that may get new requests, as far as they are known."""
        fitting = filter(self.engines.fits, self.engines.values())
        return {engine.state.info.get("scheduling_policy", "") for engine in fitting} - {""}

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
        """Raises: APIError, if all engines that may get a request would certainly refuse it for load"""
        now, engines = time.monotonic(), self.engines
        left = min((e.overloaded_until - now for e in engines.values() if e.ready and engines.fits(e)), default=0.0)
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
        following = None if source is None else follow(source, self._security, self.engines.set_addresses)
        await self.engines.run(self._check, following)

    def _check(self, now: float) -> None:
        """Notice engines that do not come back and requests without progress. `now`: monotonic seconds."""
        for engine in self.engines.values():
            if engine.watch(now, self.draining):
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
        self.owners.settle()

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
            shared: the request without number, prompt and parameters.
            identity: identity of the engines that made the output which `stream` has.

        Raises: APIError, when no engine can take a request now
        """
        self.check_ready()
        if len(self.ledger) >= self._max_open:
            raise APIError(429, f"{self._max_open} requests are open already; try again later")
        stream.number = self.owners.next_number()
        prompt = {"token_ids": pack(token_ids), "num_prompt_tokens": len(token_ids)}
        message = replace(shared, number=stream.number, params=params, **prompt)
        try:  # the scheduler would expel this frontend, with all its streams
            _requests.decode(encode(message))
        except (ProtocolError, ValueError) as error:
            raise APIError(400, f"the request exceeds a limit of the engine: {error}") from None
        now = time.monotonic()
        entry = self.ledger.open(stream, message, now, identity)
        self.placement.advance(now)
        self.owners.enter(entry)
        log.debug(
            "request accepted: request_id=%s number=%d prompt_tokens=%d engine=%s",
            shared.request_id, stream.number, len(token_ids), entry.engine,
        )  # fmt: skip

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
        self.fail([entry.stream for entry in self.ledger.oldest(self.num_open)], error)

    def fail(self, streams: list[RequestStream], error: APIError) -> None:
        """End open requests with `error`."""
        self.abort(streams)
        for stream in streams:
            stream.finish(error)

    async def reset_prefix_cache(self, reset_running: bool) -> bool:
        """Empty the prefix caches. Return False if running requests still share blocks, or an engine is not connected.

        Raises: APIError, if a scheduler does not answer
        """
        follows = "unless it is lost, it empties the cache before another request is served; repeat it for certainty"

        def make(_: EngineState, number: int) -> ControlCache:
            return ControlCache(number, CacheAction.RESET, reset_running=reset_running)

        answers = await self._ask_engines(make, follows)
        return len(answers) == len(self.engines) and all(done.complete for done in answers.values())

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
        asked = {engine: engine.state.incarnation for engine in self.engines.values()}
        answers = await self._ask_engines(make, "it may be carried out later, or in part; repeat it")
        changed = [e.name for e, number in asked.items() if not e.connection.is_open or e.state.incarnation != number]
        if is_drop and changed:  # its next scheduler loads blocks that another engine had not dropped yet
            raise APIError(503, f"engine {changed[0]} was lost meanwhile and may have the blocks again; try again")
        return answers

    async def _ask_engines(
        self, make: Callable[[EngineState, int], ControlCache], follows: str
    ) -> dict[str, CacheControlled]:
        """`follows`: what becomes of a request that an engine does not answer. Raises: APIError"""
        self.check_ready()
        engines = [engine for engine in self.engines.values() if engine.connection.is_open]
        asked = (engine.connection.ask(partial(make, engine.state)) for engine in engines)
        answers = dict[str, CacheControlled]()
        for engine, answer in zip(engines, await asyncio.gather(*asked), strict=True):
            if answer is None:
                why = f"engine {engine.name}: the scheduler did not answer ({engine.state.detail}); {follows}"
                raise APIError(503, why)
            answers[engine.name] = answer
        return answers
