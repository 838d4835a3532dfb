"""Changes of the prefix cache for frontends, which place requests where their prefixes are.

The cache is compared with what was reported, a part of its blocks at a time, instead of followed by events: a step
costs nothing, and nothing can be missed. So a report is late by `PASS_SECONDS`, and a block that came and went in
between is in none.
"""

from collections.abc import Iterator

from protocol.kv_groups import name_in_group
from protocol.records import CachedBlocks
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.kv_cache import KVCacheManager

PASS_SECONDS = 1.0
"""Seconds in which all blocks are compared."""
PART = 4096
"""Blocks that are compared at once, which takes about 0.1 ms if none has changed. Also the most names of a message."""


class CachedBlockReports:
    """Names of cached blocks as frontends know them, and the messages that keep them up to date."""

    def __init__(self) -> None:
        self.next_message: dict[int, int] = {}
        """Frontend -> number of its next message."""
        self._reported: list[bytes | None] = []
        """Name of each block as it was reported last."""
        self._at = 0
        """The block that is compared next."""
        self._due = 0.0

    def set(self, frontend: int, subscribed: bool) -> None:
        """Begin or end a subscription; one that there is goes on."""
        if subscribed:
            self.next_message.setdefault(frontend, 0)
        else:
            self.next_message.pop(frontend, None)
        if not self.next_message:
            self._reported = []

    def take(self, now: float, kv: KVCacheManager) -> Iterator[tuple[int, CachedBlocks]]:
        """Iterate over the messages that are due, each with its frontend. Call it regularly.

        Args:
            now: monotonic seconds.
        """
        if not self.next_message or now < self._due:
            return
        count, group = kv.pool.num_blocks, kv.emitted_group
        self._due = now + PASS_SECONDS * min(1.0, PART / count)
        if len(self._reported) != count:  # of another epoch, or nobody has followed it
            self._reported, self._at = [None] * count, 0
            self.next_message = dict.fromkeys(self.next_message, 0)
        changes = self._compare(kv)
        for frontend, number in self.next_message.items():
            messages = [changes] if number and any(changes) else [] if number else self._everything()
            for stored, removed in messages:
                yield frontend, CachedBlocks(number, _column(stored, group), _column(removed, group))
                number += 1
            self.next_message[frontend] = number

    def _compare(self, kv: KVCacheManager) -> tuple[list[bytes], list[bytes]]:
        """Return the names that are new in a part of the blocks, and those that are gone. Of several groups, one is
        compared: that whose blocks are emitted as events."""
        pool = kv.pool
        part = slice(self._at, min(self._at + PART, pool.num_blocks))
        self._at = part.stop % pool.num_blocks
        before, names = self._reported[part], pool.hash_of[part]
        if kv.num_groups > 1:
            names = [name if own else None for name, own in zip(names, kv.emitted[part], strict=True)]
        changed = [index for index, name in enumerate(names) if name is not before[index]]
        self._reported[part] = names
        removed = [self._gone(before[index], pool) for index in changed]
        return list(filter(None, [names[index] for index in changed])), list(filter(None, removed))

    def _gone(self, name: bytes | None, pool: BlockPool) -> bytes | None:
        """Return the name that is gone now that a block has lost `name`, which was reported; None: none is.

        Another block may have the name, which is reported there from now on, so that its loss will be seen. That block
        may have lost a name itself.
        """
        while name is not None and (elsewhere := pool.by_hash.get(name)) is not None:
            now = pool.hash_of[elsewhere]
            name = None if self._reported[elsewhere] is now else self._reported[elsewhere]
            self._reported[elsewhere] = now
        return name

    def _everything(self) -> Iterator[tuple[list[bytes], list[bytes]]]:
        names = list(filter(None, self._reported))
        for at in range(0, max(len(names), 1), PART):
            yield names[at : at + PART], []


def _column(names: list[bytes], group: int) -> bytes:
    """Return the names of a group's blocks as those of their tokens, in one column."""
    return b"".join([name_in_group(name, group) for name in names] if group else names)
