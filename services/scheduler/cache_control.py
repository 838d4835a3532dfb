"""Requests of administrators about the prefix cache: pins, and drops and resets that all ranks must confirm.

A reset without ranks waits for the next epoch, and so does one that the ranks of an epoch have not confirmed. Blocks
are adopted first, so that they are dropped, too.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from protocol.block_names import split_names
from protocol.codec import ProtocolError
from protocol.requests import CacheAction, CacheControlled, ControlCache, ResetDone, ResetPrefixCache
from protocol.steps import BlocksLoaded, KeepPins
from services.config import SchedulerConfig
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.pins import PinRefused
from services.scheduler.membership import Started
from services.scheduler.tier_reports import TierReports

log = logging.getLogger("runahead.scheduler")


class CacheControl:
    def __init__(self, config: SchedulerConfig, tiers: TierReports, on_drop: Callable[[bytes], None]) -> None:
        """
        Args:
            on_drop: called when blocks are dropped on the ranks, with the names that tiers may not have, either.
        """
        self._config, self._tiers, self._on_drop = config, tiers, on_drop
        self._answers: dict[int, dict[bytes, BlocksLoaded]] = {}
        """Ticket of a load or a drop -> answers of the ranks so far."""
        self._unconfirmed: dict[int, tuple[int, CacheControlled | ResetDone]] = {}
        """Ticket of a drop -> frontend, and the answer that it gets when all ranks have dropped the blocks."""
        self._waiting: list[tuple[int, ResetPrefixCache]] = []
        """Resets for the next epoch, with their frontends."""

    def handle(
        self, frontend: int, message: ControlCache, engine: EngineCore | None, started: Started | None
    ) -> CacheControlled | None:
        """Return the answer; None: it follows with `on_loaded`.

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

    def reset(self, frontend: int, message: ResetPrefixCache, engine: EngineCore | None) -> None:
        """Empty the prefix cache. The answer follows with `on_loaded`. `engine`: None: there are no ranks."""
        if engine is None:
            self._waiting.append((frontend, message))
            return
        self._on_drop(b"")
        ticket, done = engine.prefix_cache.reset(message.reset_running)
        log.info("prefix cache reset%s", "" if done else "; running requests still share blocks")
        self._unconfirmed[ticket] = (frontend, ResetDone(message.number, done))

    def start_epoch(self, engine: EngineCore, started: Started) -> None:
        """Adopt the blocks that the ranks hold, then carry out the resets that have waited."""
        c = self._config
        if started.held is not None and (not c.record or c.record_tokens):  # no other contains their names
            engine.prefix_cache.adopt(started.held)
            pool = engine.epoch.kv.pool
            log.info("%d of %d KV blocks are adopted", len(pool.cached), pool.num_blocks)
        waiting, self._waiting = self._waiting, []
        for frontend, message in waiting:
            self.reset(frontend, message, engine)

    def restore(self, kept: KeepPins, engine: EngineCore) -> None:
        """Go on with the pins of a scheduler that was lost. Call it before blocks are adopted."""
        if kept.block_size != self._config.block_size:
            return
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
        self._on_drop(b"".join(names))
        ticket, count = engine.prefix_cache.drop(names)
        log.info("%d of %d blocks have left the prefix cache; tiers follow", count, len(names))
        answer = self._answer(message.number, engine, started)
        self._unconfirmed[ticket] = (frontend, replace(answer, num_dropped=count * self._config.block_size))

    def _answer(self, number: int, engine: EngineCore, started: Started) -> CacheControlled:
        sizes = self._config.block_size, started.bytes_per_block, engine.epoch.kv.num_groups
        return CacheControlled(number, pins=engine.store.pins.listed(*sizes))

    def on_loaded(
        self, rank: bytes, report: BlocksLoaded, num_ranks: int, engine: EngineCore
    ) -> tuple[int, CacheControlled | ResetDone] | None:
        """A rank of the epoch in effect has answered. When all have, the blocks of a load that all have filled count.
        Return the answer to a frontend; None: there is none."""
        answers = self._answers.setdefault(report.ticket, {})
        answers[rank] = report
        if len(answers) < num_ranks:
            return None
        del self._answers[report.ticket]
        count, done = min(answer.count for answer in answers.values()), self._unconfirmed.pop(report.ticket, None)
        if done is None and engine.prefix_cache.on_loaded(report.epoch, report.ticket, count):
            self._tiers.on_loaded(answers.values())
        if done is not None and (failed := max(answer.num_failed for answer in answers.values())):
            text = f"a tier of a rank still has {failed} blocks: their files cannot be removed; its log says why"
            return done[0], CacheControlled(done[1].number, text)
        return done

    def end_epoch(self) -> Iterator[tuple[int, CacheControlled]]:
        """The workers are lost. Yield the answers that nobody waits for any more. Running requests will be recomputed
        in any case."""
        lost = "the workers were lost before they had dropped all blocks; try again later"
        for frontend, answer in self._unconfirmed.values():
            if isinstance(answer, ResetDone):
                self._waiting.append((frontend, ResetPrefixCache(answer.number)))
            else:
                yield frontend, CacheControlled(answer.number, lost)
        self._unconfirmed.clear()
        self._answers.clear()
