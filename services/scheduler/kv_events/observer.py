"""Observer that turns the changes of the prefix cache into vLLM's events."""

import time

from services.scheduler.build import CoreListener, CoreStart
from services.scheduler.core import observer as events
from services.scheduler.core.engine import EngineCore
from services.scheduler.kv_events.messages import (
    MEDIUM,
    TIER_MEDIA,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from services.scheduler.kv_events.publisher import KVEventPublisher


class KVEventObserver(CoreListener):
    """Collects the changes of one step and hands them to the publisher."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self._publisher = publisher
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def attach(self, core: EngineCore, start: CoreStart) -> None:
        core.observers.add(self)
        core.observers.blocks = True

    def on_turn(self, core: EngineCore) -> None:
        self._flush()  # a drop or a load may be followed by no step

    def close(self) -> None:
        self._publisher.close()

    def observe(self, event: events.Event) -> None:
        match event:
            case events.BlocksCached():
                self._events.append(_stored(event))
            case events.BlocksEvicted(hashes=hashes):
                self._events.append(BlockRemoved(list(hashes), MEDIUM, 0))
            case events.TierChanged(tier=tier, stored=stored, removed=removed):
                medium = TIER_MEDIA.get(tier, tier)
                if stored:  # as vLLM's offloading does: without tokens, which the event of the cache had
                    self._events.append(BlockStored([*stored], None, [], 0, None, medium, None))
                if removed:
                    self._events.append(BlockRemoved([*removed], medium))
                self._flush()
            case events.PrefixCacheReset() | events.EpochEnded() | events.AllRequestsFailed() | events.CoreRestarted():
                self._events.append(AllBlocksCleared())
                self._flush()
            case events.StepDispatched() | events.ResultApplied():
                self._flush()

    def _flush(self) -> None:
        if self._events:
            self._publisher.publish(KVEventBatch(time.time(), self._events, 0))
            self._events = []


def _stored(event: events.BlocksCached) -> BlockStored:
    adapter = event.lora
    keys = () if adapter is None else (adapter.name,)
    extra_keys: list[tuple[str, ...] | None] = [keys or None] * len(event.hashes)
    if event.parent is None and event.salt:
        extra_keys[0] = (*keys, event.salt)
    for at, seen in enumerate(event.contents):
        if seen:
            extra_keys[at] = (*(extra_keys[at] or ()), seen.decode())
    return BlockStored(
        list(event.hashes),
        event.parent,
        event.token_ids.tolist(),
        event.block_size,
        None if adapter is None else adapter.number,
        MEDIUM,
        None if adapter is None else adapter.name,
        extra_keys,
        0,
    )
