"""The prefix hits of one cache with the memory of all engines: what no placement can exceed."""

from collections import OrderedDict
from collections.abc import Iterable

from tests.simulation.placement.workload import SessionRequest


def hit_share(requests: Iterable[SessionRequest], num_blocks: int, block_size: int) -> float:
    """Return the share of prompt tokens that an LRU of so many blocks holds when they arrive."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = tokens = 0
    for request in requests:
        count = 0
        for name in request.names:
            if name not in cache:
                break
            count += 1
        for name in request.names:
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
        hits += count * block_size
        tokens += request.num_tokens
    return hits / tokens
