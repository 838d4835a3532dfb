"""The engines of a frontend, which come and go while it serves: their connections, and which of them new requests are
checked against."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from protocol.silence import SIGN_INTERVAL
from protocol.transport import HandshakeRefused
from services.frontend.engine.addresses import EngineAddress
from services.frontend.engine.connection import CHECK_INTERVAL, REFUSED_PAUSE
from services.frontend.engine.engine import ConnectedEngine
from services.frontend.engine.ledger import RequestLedger
from services.frontend.errors import APIError
from services.frontend.placement import Placement
from services.frontend.steps.ring import StepRing

log = logging.getLogger("runahead.frontend")


class Engines(dict[str, ConnectedEngine]):
    """By name. One that is listed no longer stays until it owns no request.

    Args:
        make: makes an engine of an address.
        ledger: the open requests of all engines.
        placement: receives the reports of engines.
        steps: receives the step records of one engine; None: they are not subscribed to.
        on_change: called when requests may have to be placed, moved or sent.
    """

    def __init__(
        self,
        make: Callable[[EngineAddress], ConnectedEngine],
        ledger: RequestLedger,
        placement: Placement,
        steps: StepRing | None,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__()
        self._make, self._ledger, self._placement = make, ledger, placement
        self._steps, self._on_change = steps, on_change
        self._connections: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        """Set while connections are made."""
        self.primary: ConnectedEngine | None = None
        """The engine whose sizes hold for new requests."""
        self.identity = ""
        """Identity of the engines that get new requests; "": that of the first one that serves."""

    async def run(self, check: Callable[[float], None], following: Coroutine[Any, Any, None] | None = None) -> None:
        """Connect to the engines and read until cancelled. A bug in any of this ends all of it.

        Args:
            check: called regularly with monotonic seconds.
            following: calls `set_addresses` when the engines change.

        Raises: HandshakeRefused, if the only engine, or this frontend, refuses the connection
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for engine in self.values():
                    self._connect(engine)
                self._tasks.create_task(self._watch(check))  # without signs of life the engines end all requests
                if following is not None:
                    self._tasks.create_task(following)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._tasks = None

    async def _watch(self, check: Callable[[float], None]) -> None:
        """Send signs of life, and check."""
        next_sign = 0.0
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            now = time.monotonic()
            if now >= next_sign:
                next_sign = now + SIGN_INTERVAL
                for engine in self.values():
                    engine.connection.send_sign()
            check(now)

    def set_addresses(self, addresses: Sequence[EngineAddress]) -> None:
        """Connect to the engines of this list. The streams of those that it no longer has move to others."""
        listed = {address.name: address for address in addresses}
        for name, engine in self.items():
            if name not in listed and engine.is_listed:
                log.info("engine %s is listed no longer: %d streams", name, len(self._ledger.owned(name)))
                engine.is_listed = False
                engine.drain(True)
        for name, address in listed.items():
            known = self.get(name)
            if known is not None and known.address == address:
                if not known.is_listed:
                    known.is_listed = True
                    known.drain(False)
                continue
            engine = self[name] = self._make(address)
            if known is not None:  # its requests move, or wait for the scheduler at the other endpoint
                self._disconnect(known)
                engine.state = known.state  # it is expected there for as long as at its endpoint of before
                engine.on_lost(time.monotonic())
            self.report(engine)
            self._connect(engine)
        self._follow_blocks()
        self.elect()
        self._on_change()

    def _follow_blocks(self) -> None:
        """Follow the prefix caches of engines while there is a choice between them."""
        follows = len(self) > 1 and self._placement.uses_prefixes
        for engine in self.values():
            engine.follow_blocks(follows)

    def _connect(self, engine: ConnectedEngine) -> None:
        if self._tasks is not None:
            self._connections[engine.name] = self._tasks.create_task(self._run_engine(engine))

    async def _run_engine(self, engine: ConnectedEngine) -> None:
        """Raises: HandshakeRefused, if it is the only engine"""
        while True:
            try:
                await engine.connection.run()
            except HandshakeRefused as error:
                if len(self) == 1:
                    raise
                log.error("engine %s is not used: %s", engine.name, error)
                engine.on_refused(str(error))
            await asyncio.sleep(REFUSED_PAUSE)

    def _disconnect(self, engine: ConnectedEngine) -> None:
        if (task := self._connections.pop(engine.name, None)) is not None:
            task.cancel()
        self._ledger.disconnected(engine.name, is_death=False)

    def forget_unlisted(self) -> None:
        """Forget the engines that are listed no longer and own no request."""
        for name, engine in list(self.items()):
            if not engine.is_listed and not self._ledger.owned(name):
                self._disconnect(engine)
                del self[name]
                self._ledger.forget(name)
                self._placement.on_engine_removed(name)
                self._follow_blocks()
                log.info("engine %s is forgotten: it has no streams", name)

    def report(self, engine: ConnectedEngine) -> None:
        self._placement.advance(time.monotonic())
        self._placement.on_engine(engine.name, engine.report())

    def fits(self, engine: ConnectedEngine) -> bool:
        """Return whether new requests may go to an engine, as far as its model is known."""
        return not self.identity or engine.identity in ("", self.identity)

    def elect(self) -> None:
        """Choose the engine whose sizes hold for new requests. Engines with other weights get none, unless no engine
        that stays has the weights of before."""
        engines = [engine for engine in self.values() if engine.is_listed]
        staying = [engine for engine in engines if not engine.draining]
        keeps = any(e.identity == self.identity or (e.ready and not e.identity) for e in staying)
        if self.identity and not keeps and any(engine.ready for engine in staying):
            log.warning("new requests go to engines with other weights or another context length from now on")
            self.identity = ""

        def rank(engine: ConnectedEngine) -> tuple[bool, bool, bool]:
            fits = self.fits(engine)
            return fits and engine.ready, fits and engine.accepts, not engine.refusal

        best = max(engines, key=rank, default=None)
        if best is not None and best.ready and not self.identity:
            self.identity = best.identity
        if best is not self.primary and self._steps is not None:
            if self.primary is not None:
                self.primary.follow_steps(None)
            if best is not None:
                best.follow_steps(self._steps)
        self.primary = best

    def on_engine(self, engine: ConnectedEngine) -> None:
        """An engine has sent its state, or was lost."""
        self.report(engine)
        primary = self.primary
        if primary is None or not primary.ready or primary.identity != self.identity:
            self.elect()
        self._on_change()

    def drain(self, name: str, draining: bool = True) -> None:
        """Let the streams of an engine move to others, and send it no new ones; or take that back.

        Raises: APIError
        """
        if (engine := self.get(name)) is None:
            raise APIError(404, f"there is no engine {name[:100]!r}; the engines are {', '.join(self)}")
        if draining and not any(e.ready for e in self.values() if e is not engine):
            raise APIError(409, f"engine {name} is the only one that serves; start another one first")
        engine.drain(draining)
        self.report(engine)
        self.elect()
        self._on_change()
