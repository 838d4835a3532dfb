"""Pins of a lost scheduler, and events of drops. tests/e2e/test_cache_control.py has the requests of administrators."""

from types import SimpleNamespace
from typing import cast

import pytest
from msgspec.structs import replace

from protocol.block_names import NAME_BYTES, NamedBlocks
from protocol.codec import encode
from protocol.membership import Loaded
from protocol.requests import CacheAction, CacheControlled, ControlCache
from protocol.steps import BlocksLoaded, KeepPins, KeptPin, LoadBlocks, StepMessage
from services.config import SchedulerConfig
from services.scheduler.build import CoreStart
from services.scheduler.cache_control import CacheControl
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import BlocksEvicted
from services.scheduler.core.pins import PinRefused
from services.scheduler.kv_events import KVEventObserver, KVEventPublisher
from services.scheduler.kv_events.messages import MEDIUM, BlockRemoved, KVEventBatch
from services.scheduler.membership import Started
from services.scheduler.policies import ChunkedPolicy
from services.scheduler.tier_reports import TierReports

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=32, block_size=4)


def test_a_pin_that_cannot_be_read_ends_and_the_others_go_on() -> None:
    core = EngineCore(LIMITS, ChunkedPolicy(), 1, 50)
    kept = KeepPins(1, 4, [KeptPin("torn", "", bytes(NAME_BYTES + 1)), KeptPin("whole", "", bytes(NAME_BYTES))])
    config = SchedulerConfig(block_size=4)
    control = CacheControl(config, TierReports(4), lambda _: None)
    control.restore(replace(kept, block_size=8), core)
    assert not [*core.store.pins], "its prefixes have other names"
    control.restore(kept, core)
    assert [pin.id for pin in core.store.pins] == ["whole"]


def test_a_reset_is_repeated_until_all_ranks_of_an_epoch_have_confirmed_it() -> None:
    core, drops = EngineCore(LIMITS, ChunkedPolicy(), 1, 50), list[int]()
    control = CacheControl(SchedulerConfig(), TierReports(4), lambda _: drops.append(core.epoch.number))

    def answer(rank: bytes, message: StepMessage) -> tuple[int, CacheControlled] | None:
        assert isinstance(message, LoadBlocks)
        assert message.drops_all
        return control.on_loaded(rank, BlocksLoaded(message.epoch, message.ticket, 0), 2, core)

    def reset(frontend: int, number: int, started: Started | None) -> None:
        assert control.handle(frontend, ControlCache(number, CacheAction.RESET), core, started) is None

    def next_epoch() -> Started:
        assert [*control.end_epoch()] == []
        core.end_epoch()
        core.start_epoch(LIMITS, ChunkedPolicy(), core.epoch.number + 1)
        held = NamedBlocks.from_lists([3], [bytes(NAME_BYTES)])
        started = Started(core.epoch.number, [], LIMITS, cast(Loaded, None), held)
        control.start_epoch(core, started)
        return started

    reset(7, 1, Started(core.epoch.number, [], LIMITS, cast(Loaded, None), None))
    [message] = core.dispatch()
    assert answer(b"first", message) is None
    next_epoch()
    reset(8, 5, None)
    next_epoch()
    assert not core.epoch.kv.pool.by_hash, "adopted blocks leave it, too"
    messages = [*core.dispatch()]
    assert [answer(b"first", message) for message in messages] == [None, None]
    assert [answer(b"other", message) for message in messages] == [(8, CacheControlled(5)), (7, CacheControlled(1))]
    started = next_epoch()
    assert core.epoch.kv.pool.by_hash, "they are not repeated any more"
    assert control.handle(7, ControlCache(2, CacheAction.DROP, names=bytes(NAME_BYTES)), core, started) is None
    assert drops == [1, 2, 3, 3, 4]


def test_a_drop_that_a_tier_has_not_carried_out_is_an_error() -> None:
    core, frontend = EngineCore(LIMITS, ChunkedPolicy(), 1, 50), 7
    control = CacheControl(SchedulerConfig(), TierReports(4), lambda _: None)
    started = Started(core.epoch.number, [], LIMITS, Loaded("", 0, 0, 1, 1), None)
    control.handle(frontend, ControlCache(2, CacheAction.DROP, names=bytes(NAME_BYTES)), core, started)
    [message] = core.dispatch()
    assert isinstance(message, LoadBlocks)
    done = BlocksLoaded(message.epoch, message.ticket, 0)
    assert control.on_loaded(b"first", replace(done, num_failed=3), 2, core) is None
    text = "a tier of a rank still has 3 blocks: their files cannot be removed; its log says why"
    assert control.on_loaded(b"other", done, 2, core) == (frontend, CacheControlled(2, text))


def test_workers_of_later_epochs_have_no_pin_that_was_removed() -> None:
    """Also those that were no ranks when it was removed."""
    core = EngineCore(LIMITS, ChunkedPolicy(), 1, 50)
    core.prefix_cache.pin("first", "", [bytes(NAME_BYTES)])
    assert [*core.dispatch()] == [KeepPins(1, 4, [KeptPin("first", "", bytes(NAME_BYTES))])]
    core.prefix_cache.unpin("first")
    for epoch in (2, 3):
        core.end_epoch()
        core.start_epoch(LIMITS, ChunkedPolicy(), epoch)
        assert [*core.dispatch()] == [KeepPins(epoch, 4, [])]


def test_all_pins_of_a_long_prefix_fit_into_one_message() -> None:
    core = EngineCore(Limits(4, 64, 64, 2**19, 4), ChunkedPolicy(), 1, 50)
    names = [number.to_bytes(NAME_BYTES, "little") for number in range(2**18)]
    for number in range(4):
        core.prefix_cache.pin(f"pin {number}", "", names)
    with pytest.raises(PinRefused, match="unpin some first"):
        core.prefix_cache.pin("one more", "", names)
    [message] = core.dispatch()
    assert encode(message)


def test_kv_events_of_a_drop_are_published_without_a_step() -> None:
    core, published = EngineCore(LIMITS, ChunkedPolicy(), 1, 50), list[KVEventBatch]()
    listener = KVEventObserver(cast(KVEventPublisher, SimpleNamespace(publish=published.append)))
    listener.attach(core, CoreStart(LIMITS, 1, 50, 0, None))
    core.observers.emit(BlocksEvicted((bytes(NAME_BYTES),)))
    listener.on_turn(core)
    [batch] = published
    assert batch.events == [BlockRemoved([bytes(NAME_BYTES)], MEDIUM, 0)]
