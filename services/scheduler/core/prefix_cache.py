"""Changes of the prefix cache that requests do not make: pins, drops, loads, and blocks of the epoch before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from protocol.block_names import NamedBlocks
from protocol.kv_groups import name_in_group
from protocol.steps import LoadBlocks
from services.scheduler.core import observer as events
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.loading import BlockLoad
from services.scheduler.core.pins import Pin
from services.scheduler.core.slots import DROP
from services.scheduler.core.store import RequestStore


@dataclass(eq=False)
class PrefixCacheControl:
    """Part of `EngineCore`. The shell calls its methods as messages arrive; `begin_loads` and `messages` belong to
    `dispatch`. Pins, drops and loads ahead are not recorded: a scheduler that is recorded refuses them."""

    store: RequestStore
    epoch: EpochState
    lifecycle: Lifecycle

    def adopt(self, held: NamedBlocks) -> None:
        """Start the prefix cache of an epoch that has just begun with the whole blocks that all of its workers hold
        (adopted block)."""
        self.store.observers.emit(events.BlocksAdopted(held))
        self.epoch.kv.begin_with(held)

    def reset(self, reset_running: bool = False) -> tuple[int, bool]:
        """Empty the prefix cache; with `reset_running`, recompute running requests too. Return the ticket with which
        the workers answer, and False if running requests still share blocks. There must be workers."""
        self.store.observers.emit(events.PrefixCacheReset(reset_running))
        for slot in self.epoch.running.tolist()[::-1] if reset_running else ():
            self.lifecycle.preempt(slot, events.PreemptionCause.RESET, stale=DROP)
        self.lifecycle.end_loads()
        self.epoch.kv.forget_all()
        return self.store.loading.drop_all(), not len(self.epoch.running)

    def pin(self, pin: str, owner: str, names: Sequence[bytes]) -> None:
        """Pin the prefix whose blocks have these names (pinned block). Raises: PinRefused"""
        self.store.pins.add(Pin(pin, owner, [*names]), self.epoch.kv, self.epoch.limits)

    def unpin(self, pin: str) -> list[bytes]:
        """End a pin. Return the names of its blocks. Raises: PinRefused"""
        return self.store.pins.remove(pin, self.epoch.kv).names

    def drop(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Let nobody find the blocks with these names (dropped block). Return the ticket with which the workers answer,
        and the number of blocks that have left the prefix cache. There must be workers."""
        groups = range(self.epoch.kv.num_groups)
        all_names = [name_in_group(name, group) for name in names for group in groups]
        count = self.lifecycle.drop_blocks(all_names)
        return self.store.loading.drop(all_names, self.store.now), count // len(groups)

    def load_ahead(self, names: Sequence[bytes], peers: Sequence[str]) -> None:
        """Load the blocks of a prefix with the next step, for a request to come (loaded block)."""
        self.store.loading.ahead.append(([*names], tuple(peers)))

    def on_loaded(self, epoch: int, ticket: int, count: int) -> bool:
        """All ranks have filled the first `count` blocks of a load (loaded block). Return False if the load was given
        up before."""
        self.store.observers.emit(events.BlocksFilled(epoch, ticket, count))
        load = self.store.loading.by_ticket.get(ticket) if epoch == self.epoch.number else None
        if load is not None:
            self._end_load(load, min(count, len(load.blocks)))
        return load is not None

    def _end_load(self, load: BlockLoad, count: int) -> None:
        self.store.loading.times_of(load.peers).add(load, count, self.store.now)
        found = count * self.epoch.limits.block_size
        self.store.counters["external_prefix_cache_hits"] += found
        self.store.counters["external_prefix_cache_queries"] += found if load.is_ahead else 0
        self.epoch.loads.end(load, count)

    def begin_loads(self) -> None:
        """Give up the loads that take too long, and begin those for requests to come. Nobody waits for the latter, and
        blocks that are not there are asked for again by such a request."""
        loading = self.store.loading
        for load in loading.expired(self.store.now) if loading.under_way else ():
            self._end_load(load, 0)
        while loading.ahead and not self.store.suspects.active:
            names, peers = loading.ahead.pop(0)
            prefix = self.epoch.kv.prefix_of(names)
            missing = names[len(prefix) :]
            if missing and missing[0] not in loading.by_first and self.epoch.loads.can_ask(peers):
                self.epoch.loads.begin(prefix, missing, peers, is_ahead=True)

    def messages(self, next_step: int) -> Iterator[LoadBlocks]:
        """Yield the loads and drops that were not sent yet. Loads that were started with a step are sent before it."""
        unsent = self.store.loading.unsent
        while unsent:
            message = replace(unsent.pop(0), epoch=self.epoch.number, next_step=next_step)
            self.store.observers.emit(events.LoadSent(message))
            yield message
