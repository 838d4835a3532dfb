"""Loads of KV blocks: which ones are worth it, and the blocks that they fill (loaded block, docs/invariants.md)."""

from dataclasses import dataclass

from services.scheduler.core.kv_cache import KVCacheManager
from services.scheduler.core.limits import Limits
from services.scheduler.core.loading import LEAST_TIMEOUT, BlockLoad
from services.scheduler.core.request import Request
from services.scheduler.core.store import RequestStore


@dataclass(eq=False)
class BlockLoads:
    """Begins and ends the loads of one epoch. Those under way are in `RequestStore.loading`."""

    store: RequestStore
    kv: KVCacheManager
    limits: Limits

    def wait_for(self, request: Request, prefix: list[int]) -> bool:
        """Ask a tier, or another engine, for the blocks behind the cached prefix of a waiting request, if that is
        expected to be faster than computing them. Return whether the request waits for a load, which lets others pass.
        A suspect does not."""
        if request.asked or self.store.suspects.active or not self.can_ask(request.kv_peers):
            return False
        loading, most = self.store.loading, (len(request.token_ids) - 1) // self.limits.block_size
        names = request.block_hashes[len(prefix) : most]
        if not (names and request.reads_prefix_cache and self.kv.enable_prefix_caching):
            return False
        if not loading.join(request, names[0]):
            if not self.begin(prefix, names, request.kv_peers):
                return False
            loading.join(request, names[0])
            request.asked = True
        self.store.waiting.remove(request)
        return True

    def can_ask(self, peers: tuple[str, ...]) -> bool:
        """Return whether there is a tier, or one of another engine's workers to ask."""
        return self.limits.loads_blocks or (self.limits.fetches_blocks and bool(peers))

    def begin(self, prefix: list[int], names: list[bytes], peers: tuple[str, ...], is_ahead: bool = False) -> bool:
        """Ask for the blocks with these names behind a cached prefix. Return False if that is not worth it, blocks are
        short, or the first one was dropped lately. `is_ahead`: for requests to come."""
        store, kv, size = self.store, self.kv, self.limits.block_size
        peers = peers if self.limits.fetches_blocks else ()
        if not (names := store.loading.loadable(names, store.now)):
            return False
        computing = len(names) * size * store.loading.seconds_per_token
        if not store.loading.times_of(peers).is_worth(computing, len(names), store.now):
            return False
        if kv.num_missing(prefix, (len(prefix) + len(names)) * size) > kv.num_free:
            return False
        blocks = kv.reserve(prefix, len(names))
        gives_up = store.now + max(LEAST_TIMEOUT, computing)
        store.loading.start(BlockLoad(prefix, blocks, names, peers, is_ahead, store.now, gives_up))
        store.counters["external_prefix_cache_queries"] += 0 if is_ahead else len(names) * size
        return True

    def end(self, load: BlockLoad, count: int) -> None:
        """A load has ended with its first `count` blocks filled, or is given up: workers fill no block that was given
        to somebody else. Its requests wait for seats again, and find the blocks in the prefix cache."""
        self.store.loading.remove(load)
        self.kv.end_reservation(load.prefix, load.blocks, load.names[:count])
        for request in load.requests:
            request.asked |= count < len(load.names) and not load.is_ahead
            self.store.waiting.add(request)
