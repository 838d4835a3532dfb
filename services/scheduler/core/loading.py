"""Requests whose prefix is loaded from a tier, a home of KV blocks outside of the workers' caches, or from the workers
of another engine (loaded block, docs/invariants.md).

They wait beside the queue. They hold the blocks that are filled, but no seat and no place in the order, and no step
waits for them. The core does not know what a tier holds: a load asks for a run of blocks by name, and the workers
report how many of them all ranks have. So a load that finds nothing costs its request the time of the answer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol.codec import pack
from protocol.steps import LoadBlocks
from services.scheduler.core.request import Request

SHARE = 0.5
"""Weight of the newest measurement in a mean."""
MISS_SHARE = 1 / 16
"""Maximum time of an answer that finds nothing, as a share of the time to compute the blocks that are asked for."""
VALID_SECONDS = 60.0
"""Age at which measured times of loads count no more, so that a tier that was slow is tried again."""
DROPPED_SECONDS = 30.0
"""Seconds for which no load brings a block that was dropped: another engine may not have dropped it yet. A frontend
waits for the confirmation of all engines for a shorter time."""
LEAST_TIMEOUT = 2.0
"""Seconds after which a load is given up, at least; longer if computing its blocks takes longer."""


@dataclass(eq=False, slots=True)
class BlockLoad:
    """Blocks that are being filled."""

    prefix: list[int]
    """Cached blocks before them; held, so that they stay."""
    blocks: list[int]
    names: list[bytes]
    peers: tuple[str, ...]
    """Workers of another engine that are asked, too, by rank."""
    is_ahead: bool
    """It was begun for requests to come."""
    began: float
    gives_up: float
    """Times on the scheduler's clock, seconds."""
    ticket: int = 0
    requests: list[Request] = field(default_factory=list)
    """Requests that wait for it: the first one asked, the others need its first block too."""


@dataclass
class LoadTimes:
    """Measured times of loads."""

    block: float = 0.0
    """Mean seconds to load a block; 0.0: not measured."""
    miss: float = 0.0
    """Seconds of the faster of the last two answers that found nothing, as one may be late by chance; 0.0: there were
    fewer."""
    _last_miss: float = 0.0
    _measured: float = -VALID_SECONDS
    """When a load last ended."""

    def is_worth(self, computing: float, num_blocks: int, now: float) -> bool:
        """Return whether to ask for so many blocks. `computing`: seconds to compute them; 0.0: not known."""
        if not computing or now - self._measured >= VALID_SECONDS:
            return True
        return self.miss <= MISS_SHARE * computing and num_blocks * self.block < computing

    def add(self, load: BlockLoad, count: int, now: float) -> None:
        """A load has ended with its first `count` blocks filled."""
        seconds, self._measured = now - load.began, now
        if count:
            self.block += (SHARE if self.block else 1.0) * (seconds / count - self.block)
        else:
            self.miss, self._last_miss = min(seconds, self._last_miss), seconds


@dataclass
class LoadingRequests:
    """Loads by ticket; a ticket is never used twice with the same workers."""

    times: LoadTimes = field(default_factory=LoadTimes)
    peer_times: LoadTimes = field(default_factory=LoadTimes)
    """Times of loads that another engine is asked for."""
    seconds_per_token: float = 0.0
    """Time to compute a prompt token; 0.0: not measured."""
    last_ticket: int = 0
    unsent: list[LoadBlocks] = field(default_factory=list)
    """Messages that the workers were not sent yet, without the epoch and the step."""
    ahead: list[tuple[list[bytes], tuple[str, ...]]] = field(default_factory=list)
    """Loads to begin: names of the blocks of a prefix, and who is asked, too."""
    _dropped_at: dict[bytes, float] = field(default_factory=dict)
    """Names of blocks that were dropped lately, and when."""
    by_ticket: dict[int, BlockLoad] = field(default_factory=dict)
    """Loads that have not ended."""
    by_first: dict[bytes, BlockLoad] = field(default_factory=dict)
    """The same by the name of the first block."""
    load_of: dict[Request, BlockLoad] = field(default_factory=dict)
    """The load that a request waits for."""

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self.load_of)

    def __iter__(self) -> Iterator[BlockLoad]:
        return iter(self.by_ticket.values())

    @property
    def under_way(self) -> bool:
        return bool(self.by_ticket)

    @property
    def last(self) -> BlockLoad | None:
        """The load that began last; None: there is none."""
        return next(reversed(self.by_ticket.values()), None)

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.load_of)

    def times_of(self, peers: tuple[str, ...]) -> LoadTimes:
        return self.peer_times if peers else self.times

    def start(self, load: BlockLoad) -> None:
        self.last_ticket += 1
        load.ticket = self.last_ticket
        self.by_ticket[load.ticket] = self.by_first[load.names[0]] = load
        blocks, names = pack(load.blocks), b"".join(load.names)
        self.unsent.append(LoadBlocks(0, 0, load.ticket, blocks, names, [*load.peers]))

    def drop(self, names: list[bytes], now: float) -> int:
        """Let the workers drop blocks. Return the ticket that they answer with."""
        self.last_ticket += 1
        self.unsent.append(LoadBlocks(0, 0, self.last_ticket, b"", b"", dropped=b"".join(names)))
        self._dropped_at = {name: at for name, at in self._dropped_at.items() if now - at < DROPPED_SECONDS}
        self._dropped_at |= dict.fromkeys(names, now)
        return self.last_ticket

    def drop_all(self) -> int:
        """Let the workers drop all blocks in their memory. Return the ticket that they answer with."""
        self.last_ticket += 1
        self.unsent.append(LoadBlocks(0, 0, self.last_ticket, b"", b"", drops_all=True))
        return self.last_ticket

    def loadable(self, names: list[bytes], now: float) -> list[bytes]:
        """Return the first blocks of these, up to one that was dropped lately."""
        is_dropped = (now - self._dropped_at.get(name, -DROPPED_SECONDS) < DROPPED_SECONDS for name in names)
        return names[: next((at for at, dropped in enumerate(is_dropped) if dropped), None)]

    def join(self, request: Request, name: bytes) -> bool:
        """Let a request wait for the load that begins with this block. Return False if there is none."""
        if (load := self.by_first.get(name)) is None:
            return False
        load.requests.append(request)
        self.load_of[request] = load
        return True

    def expired(self, now: float) -> list[BlockLoad]:
        """Return the loads that take too long."""
        return [load for load in self if now >= load.gives_up]

    def leave(self, request: Request) -> BlockLoad | None:
        """Remove a request. Return its load if nobody waits for that one any more, and none is to come."""
        load = self.load_of.pop(request)
        load.requests.remove(request)
        return None if load.requests or load.is_ahead else load

    def remove(self, load: BlockLoad) -> None:
        """Remove a load that has ended, with its requests."""
        del self.by_ticket[load.ticket], self.by_first[load.names[0]]
        for request in load.requests:
            del self.load_of[request]

    def restart(self, last_ticket: int) -> None:
        """Drop the measured times, and the names of dropped blocks; there is no load."""
        self.last_ticket, self.seconds_per_token, self._dropped_at = last_ticket, 0.0, {}
        self.times, self.peer_times = LoadTimes(), LoadTimes()
