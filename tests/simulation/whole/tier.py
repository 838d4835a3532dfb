"""KV blocks of the simulated system that outlive processes: a tier, and the memory of a keeper."""

import os
from collections import Counter
from collections.abc import Callable

from services.kv_keeper import KeptMemory, Memories
from services.worker.kv_memory import KVMemory
from services.worker.tiers.changes import TierChanges
from tests.simulation.oracle import TORN
from tests.simulation.whole.hub import Hub, SimulatedProcess

KV = list[list[int | None]]
WIDTH = 9
"""Bytes of a position: a hash, TORN, or BLANK."""
BLANK = -2
BLOCKS_PER_ANSWER = 2
"""Blocks that a worker sends to one of another engine at once."""


class SimulatedKeeper:
    """The memories of a keeper, and the blocks of the oracles that belong to each."""

    def __init__(self) -> None:
        self.memories = Memories()
        self.kv: dict[int, KV] = {}
        """By inode of the memory."""


class Claim(KeptMemory):
    """A worker's connection to the keeper; the end of the process ends it."""

    def __init__(self, keeper: SimulatedKeeper, process: SimulatedProcess) -> None:
        self.keeper, self._process, self._last = keeper, process, -1
        process.on_end.append(self._end)

    def connect(self) -> None: ...

    def claim(self, digest: bytes) -> int:
        self._last = os.dup(self.keeper.memories.claim(self._process, digest))
        return self._last

    def drop(self) -> None:
        self.keeper.memories.free()

    def _end(self) -> None:
        self.keeper.memories.end(self._process)
        if self._last >= 0:  # the caller has closed those before
            os.close(self._last)


class OracleMemory(KVMemory):
    """The blocks of an oracle, which has a hash at each position."""

    read: Callable[[int], list[int | None]]
    """Returns what a block holds for a reader beside the steps."""

    def __init__(self, keeper: SimulatedKeeper | None, process: SimulatedProcess) -> None:
        super().__init__(None if keeper is None else Claim(keeper, process))
        self._all: dict[int, KV] = {} if keeper is None else keeper.kv

    @property
    def kv(self) -> KV:
        return self._all.get(self._place, [])

    @kv.setter
    def kv(self, kv: KV) -> None:
        self._all[self._place] = kv

    @property
    def _place(self) -> int:
        return os.fstat(self._descriptor).st_ino if self._descriptor >= 0 else id(self)

    @property
    def block_bytes(self) -> int:
        return WIDTH * len(self.kv[0])

    def read_block(self, block: int, into: memoryview) -> None:
        words = [BLANK if word is None else word for word in self.read(block)]
        into[:] = b"".join(word.to_bytes(WIDTH, "little", signed=True) for word in words)

    def write_block(self, block: int, data: memoryview) -> None:
        words = [int.from_bytes(data[at : at + WIDTH], "little", signed=True) for at in range(0, len(data), WIDTH)]
        assert not {TORN, BLANK} & set(words), "tiers keep, and peers send, whole blocks"
        self.kv[block] = [*words]


class SlowTier:
    """A `Tier` that takes time, is full or cannot be read now and then."""

    def __init__(self, hub: Hub, kept: dict[bytes, bytes], happened: Counter[str]) -> None:
        """`kept`: outlives the process."""
        self._hub, self._kept, self._happened = hub, kept, happened
        self.label, self.changes = "host", TierChanges()
        self._seconds = hub.rng.choice((0.0, 0.001, 0.02, 0.3))

    def _wait(self) -> None:
        if self._seconds:
            self._hub.sleep(self._seconds * self._hub.rng.random())

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._kept.values()))

    def begin(self) -> None: ...

    def drop(self, name: bytes) -> None:
        self._kept.pop(name, None)

    def has(self, name: bytes) -> bool:
        return name in self._kept

    def get(self, name: bytes, into: memoryview) -> bool:
        self._wait()
        data = self._kept.get(name)
        if data is None or self._hub.rng.random() < 0.02:
            return False
        into[:] = data
        self._happened["blocks loaded"] += 1
        return True

    def put(self, name: bytes, data: memoryview) -> None:
        written = bytes(data)
        self._wait()
        if self._hub.rng.random() < 0.95:
            self._kept[name] = written
