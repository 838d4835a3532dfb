"""Requests of administrators about the prefix cache: pins, and drops and resets that all ranks must confirm.

A reset without ranks waits for the next epoch, and so does one that the ranks of an epoch have not confirmed. Blocks
are adopted first, so that they are dropped, too.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from protocol.block_names import split_names
from protocol.codec import ProtocolError
from protocol.requests import CacheAction, CacheControlled, ControlCache
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
        self._unconfirmed: dict[int, tuple[int, ControlCache, CacheControlled]] = {}
        """Ticket of a drop or a reset -> frontend, its message, and the answer for when all ranks have confirmed it."""
        self._waiting: list[tuple[int, ControlCache]] = []
        """Resets for the next epoch, with their frontends."""

    def handle(
        self, frontend: int, message: ControlCache, engine: EngineCore | None, started: Started | None
    ) -> CacheControlled | None:
        """Return the answer; None: it follows with `on_loaded`.

        Args:
            started: the epoch in effect; None: there is none.

        Raises: ProtocolError
        """
        if message.action is CacheAction.RESET:
            if engine is None or started is None:
                self._waiting.append((frontend, message))
            else:
                self._reset(frontend, message, engine)
            return None
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

    def _reset(self, frontend: int, message: ControlCache, engine: EngineCore) -> None:
        self._on_drop(b"")
        ticket, done = engine.prefix_cache.reset(message.reset_running)
        log.info("prefix cache reset%s", "" if done else "; running requests still share blocks")
        self._unconfirmed[ticket] = (frontend, message, CacheControlled(message.number, complete=done))

    def start_epoch(self, engine: EngineCore, started: Started) -> None:
        """Adopt the blocks that the ranks hold, then carry out the resets that have waited."""
        c = self._config
        if started.held is not None and (not c.record or c.record_tokens):  # no other contains their names
            engine.prefix_cache.adopt(started.held)
            pool = engine.epoch.kv.pool
            log.info("%d of %d KV blocks are adopted", len(pool.cached), pool.num_blocks)
        waiting, self._waiting = self._waiting, []
        for frontend, message in waiting:
            self._reset(frontend, message, engine)

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
        answer = replace(answer, num_dropped=count * self._config.block_size)
        self._unconfirmed[ticket] = (frontend, message, answer)

    def _answer(self, number: int, engine: EngineCore, started: Started) -> CacheControlled:
        sizes = self._config.block_size, started.bytes_per_block, engine.epoch.kv.num_groups
        return CacheControlled(number, pins=engine.store.pins.listed(*sizes))

    def on_loaded(
        self, rank: bytes, report: BlocksLoaded, num_ranks: int, engine: EngineCore
    ) -> tuple[int, CacheControlled] | None:
        """A rank of the epoch in effect has answered. When all have, the blocks of a load that all have filled count.
        Return the answer to a frontend; None: there is none."""
        answers = self._answers.setdefault(report.ticket, {})
        answers[rank] = report
        if len(answers) < num_ranks:
            return None
        del self._answers[report.ticket]
        if report.ticket not in self._unconfirmed:
            count = min(answer.count for answer in answers.values())
            if engine.prefix_cache.on_loaded(report.epoch, report.ticket, count):
                self._tiers.on_loaded(answers.values())
            return None
        frontend, message, answer = self._unconfirmed.pop(report.ticket)
        if failed := max(report.num_failed for report in answers.values()):
            text = f"a tier of a rank still has {failed} blocks: their files cannot be removed; its log says why"
            answer = CacheControlled(message.number, text)
        return frontend, answer

    def end_epoch(self) -> Iterator[tuple[int, CacheControlled]]:
        """The workers are lost. Yield the answers that nobody waits for any more. Running requests will be recomputed
        in any case."""
        lost = "the workers were lost before they had dropped all blocks; try again later"
        for frontend, message, _ in self._unconfirmed.values():
            if message.action is CacheAction.RESET:
                self._waiting.append((frontend, message))
            else:
                yield frontend, CacheControlled(message.number, lost)
        self._unconfirmed.clear()
        self._answers.clear()
