"""Changes of the prefix cache as events: a listener always knows which blocks can be found, and their tokens."""

from hashlib import sha256
from typing import ClassVar

import numpy as np
import pytest

from protocol.block_names import split_names
from protocol.kv_groups import name_in_group
from services.scheduler.core import observer as events
from services.scheduler.core.engine import EngineCore
from services.scheduler.recording.conversion import Converter
from tests.simulation import world
from tests.simulation.driver import play
from tests.simulation.workload import draw


class CacheListener:
    """The cached blocks as the events tell them."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.tokens_of: dict[bytes, bytes] = {}
        self.num_cached = self.num_evicted = self.num_hit = 0
        self.adopted: set[bytes] = set()
        self.was_emptied = False
        self.loads: dict[int, list[bytes]] = {}

    def observe(self, event: events.Event) -> None:
        match event:
            case events.BlocksCached(hashes=hashes, parent=parent, salt=salt, block_size=size):
                has_window = bool(self._core.epoch.limits.groups[self._core.epoch.kv.emitted_group].size)
                # Running requests keep their blocks when the cache is emptied, and their next ones follow them.
                assert parent is None or parent in self.tokens_of or has_window or self.was_emptied
                before = sha256(salt.encode()).digest() if parent is None else parent
                for at, block_hash in enumerate(hashes):
                    tokens = event.token_ids[at * size : (at + 1) * size].tobytes()
                    seen = event.contents[at] if event.contents else b""
                    assert sha256(before + tokens + seen).digest() == block_hash
                    assert block_hash not in self.tokens_of
                    self.tokens_of[block_hash] = tokens
                    self.num_hit += block_hash in self.adopted
                    before = block_hash
                self.num_cached += len(hashes)
            case events.BlocksEvicted(hashes=hashes):
                for block_hash in hashes:
                    del self.tokens_of[block_hash]
                self.num_evicted += len(hashes)
            case events.PrefixCacheReset() | events.EpochEnded() | events.AllRequestsFailed():
                self.was_emptied |= isinstance(event, events.PrefixCacheReset)
                self.tokens_of.clear()
                self.adopted = set()
            case events.BlocksAdopted(held=held):
                group = self._core.epoch.kv.emitted_group
                self.adopted = {name_in_group(name, group) for _, name in held.pairs()}
            case events.LoadSent(message=message):
                self.loads[message.ticket] = split_names(message.names)
            case events.BlocksFilled(ticket=ticket, count=count):
                self.adopted.update(self.loads[ticket][:count])
            case events.StepDispatched() | events.ResultApplied():
                kv = self._core.epoch.kv
                names = (name for name, block in kv.pool.by_hash.items() if kv.emitted[block])
                cached = {name_in_group(name, kv.emitted_group) for name in names}
                if self.adopted:  # they are announced with the first request that hits them
                    assert set(self.tokens_of) <= cached <= set(self.tokens_of) | self.adopted
                else:
                    assert set(self.tokens_of) == cached


class ListenedCore(EngineCore):
    """A core with such a listener."""

    listeners: ClassVar[list[CacheListener]]

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.listener = CacheListener(self)
        self.listeners.append(self.listener)
        self.observers.add(self.listener)
        self.observers.blocks = True


@pytest.mark.parametrize("depth", [1, 2])
def test_events_tell_which_blocks_can_be_found(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Core(ListenedCore):
        listeners: ClassVar[list[CacheListener]] = []

    monkeypatch.setattr(world, "EngineCore", Core)
    for seed in range(20):
        if depth in draw(seed).depths:
            play(seed, depth, tier=seed % 3 == 0)
    assert sum(listener.num_cached for listener in Core.listeners) > 100
    assert sum(listener.num_evicted for listener in Core.listeners) > 10
    assert sum(listener.num_hit for listener in Core.listeners) > 0


def test_events_of_blocks_are_not_recorded() -> None:
    for converter in (Converter(keeps_tokens=True), Converter(keeps_tokens=False)):
        assert converter.records(events.BlocksEvicted((b"hash",))) == []
        assert converter.records(events.BlocksCached((b"hash",), None, np.zeros(4, np.int32), 4, "")) == []
