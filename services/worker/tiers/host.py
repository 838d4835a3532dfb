"""A tier in the memory of the worker's process: the blocks that were used last, within a number of bytes."""

from collections import OrderedDict
from contextlib import suppress

from services.worker.tiers.changes import TierChanges


class HostTier:
    label = "host"

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self.changes = TierChanges()
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        """The first one is removed first. Two threads use it: each access is one operation."""

    def begin(self) -> None: ...

    def has(self, name: bytes) -> bool:
        return name in self._blocks

    def get(self, name: bytes, into: memoryview) -> bool:
        """Copy a block. Return False if it is missing."""
        data = self._blocks.get(name)
        if data is None:
            return False
        into[:] = data
        with suppress(KeyError):  # the other thread removed it
            self._blocks.move_to_end(name)
        return True

    def drop(self, name: bytes) -> None:
        if (data := self._blocks.pop(name, None)) is not None:
            self.num_bytes -= len(data)
            self.changes.removed.append(name)

    def clear(self) -> None:
        for name in [*self._blocks]:
            self.drop(name)

    def put(self, name: bytes, data: memoryview) -> None:
        # The last epoch's thread may have put it meanwhile
        self.num_bytes -= len(self._blocks.pop(name, b""))
        while self._blocks and self.num_bytes + len(data) > self._max_bytes:
            evicted, content = self._blocks.popitem(last=False)
            self.num_bytes -= len(content)
            self.changes.removed.append(evicted)
        if len(data) <= self._max_bytes:
            self._blocks[name] = bytes(data)
            self.num_bytes += len(data)
            self.changes.stored.append(name)
