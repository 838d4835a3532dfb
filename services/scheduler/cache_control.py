"""Requests of administrators about the prefix cache: pins, and drops that all ranks must confirm."""

import logging
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from protocol.block_names import split_names
from protocol.codec import ProtocolError
from protocol.requests import CacheAction, CacheControlled, ControlCache
from protocol.steps import BlocksLoaded, KeepPins
from services.config import SchedulerConfig
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.pins import PinRefused
from services.scheduler.membership import Started

log = logging.getLogger("runahead.scheduler")


class CacheControl:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._unconfirmed: dict[int, tuple[int, CacheControlled]] = {}
        """Ticket of a drop -> frontend, and the answer that it gets when all ranks have dropped the blocks."""

    def handle(
        self, frontend: int, message: ControlCache, engine: EngineCore | None, started: Started | None
    ) -> CacheControlled | None:
        """Return the answer; None: it follows with `on_dropped`.

        Args:
            started: the epoch in effect; None: there is none.

        Raises: ProtocolError
        """
        names = split_names(message.names)
        try:
            if engine is None or started is None:
                raise PinRefused("the engine is not ready; try again later")
            if message.action is not CacheAction.LIST:
                self._check(engine)
            match message.action:
                case CacheAction.PIN:
                    engine.prefix_cache.pin(message.pin, message.owner, names)
                    log.info("prefix pinned: %s, %d blocks", message.pin, len(names))
                case CacheAction.UNPIN:
                    engine.prefix_cache.unpin(message.pin)
                    log.info("prefix unpinned: %s", message.pin)
                case CacheAction.LOAD:
                    engine.prefix_cache.load_ahead(names, message.kv_peers)
                    return None
                case CacheAction.DROP:
                    self._drop(frontend, message, names, engine, started)
                    return None
        except PinRefused as refused:
            return CacheControlled(message.number, str(refused))
        return self._answer(message.number, engine, started)

    def restore(self, kept: KeepPins, engine: EngineCore) -> None:
        """Go on with the pins of a scheduler that was lost. Call it before blocks are adopted."""
        for pin in kept.pins:
            try:
                self._check(engine)
                engine.prefix_cache.pin(pin.pin, pin.owner, split_names(pin.names))
            except (PinRefused, ProtocolError) as refused:
                log.warning("a pin of the last scheduler ends: %s: %s", pin.pin, refused)

    def _check(self, engine: EngineCore) -> None:
        """Raises: PinRefused"""
        if not self._config.enable_prefix_caching:
            raise PinRefused("the prefix cache is off (--no-enable-prefix-caching)")
        if not engine.epoch.kv.enable_prefix_caching:
            raise PinRefused("the prefix cache is off: this model has recurrent states")
        if self._config.record:
            raise PinRefused("pins and drops are not recorded: they are refused with --record")

    def _drop(
        self, frontend: int, message: ControlCache, names: Sequence[bytes], engine: EngineCore, started: Started
    ) -> None:
        """Raises: PinRefused"""
        if message.pin:
            names = engine.prefix_cache.unpin(message.pin)
        ticket, count = engine.prefix_cache.drop(names)
        log.info("%d of %d blocks have left the prefix cache; tiers follow", count, len(names))
        answer = self._answer(message.number, engine, started)
        self._unconfirmed[ticket] = (frontend, replace(answer, num_dropped=count * self._config.block_size))

    def _answer(self, number: int, engine: EngineCore, started: Started) -> CacheControlled:
        sizes = self._config.block_size, started.bytes_per_block, engine.epoch.kv.num_groups
        return CacheControlled(number, pins=engine.store.pins.listed(*sizes))

    def on_dropped(self, report: BlocksLoaded) -> tuple[int, CacheControlled] | None:
        """All ranks have answered. Return the answer to a frontend; None: they have filled blocks instead."""
        return self._unconfirmed.pop(report.ticket, None)

    def end_epoch(self) -> Iterator[tuple[int, CacheControlled]]:
        """The workers are lost. Yield the answers that nobody waits for any more."""
        lost = "the workers were lost before they had dropped all blocks; try again later"
        for frontend, answer in self._unconfirmed.values():
            yield frontend, CacheControlled(answer.number, lost)
        self._unconfirmed.clear()
