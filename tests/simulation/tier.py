"""A tier of the simulated world, and the engine that its workers fetch from: blocks that outlive epochs, and loads on
their way. Faults come from the driver."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.block_names import NAME_BYTES, split_names
from protocol.codec import unpack
from protocol.steps import LoadBlocks
from services.worker.kv_memory import BlockNames
from tests.simulation.oracle import TORN

KV = list[list[int | None]]


@dataclass(eq=False)
class LoadUnderWay:
    message: LoadBlocks
    filled: int = 0
    ended: bool = False
    """True: the next block is missing, torn or foreign, or was given away."""
    copy: Callable[[], list[int | None] | None] | None = None
    """Ends the copy of the next block that another engine has begun."""

    @property
    def blocks(self) -> list[tuple[int, bytes]]:
        names = self.message.names
        blocks = unpack(self.message.blocks).tolist()
        return [(block, names[i * NAME_BYTES : (i + 1) * NAME_BYTES]) for i, block in enumerate(blocks)]

    @property
    def is_over(self) -> bool:
        return self.ended or self.filled == len(self.blocks)


@dataclass
class SimulatedTier:
    kept: dict[bytes, list[int | None]] = field(default_factory=dict)
    loads: list[LoadUnderWay] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    begin_copy: Callable[[bytes], Callable[[], list[int | None] | None] | None] | None = None
    """`World.begin_copy` of another engine; None: there is none."""

    def store(self, names: BlockNames, kv: KV) -> None:
        """Write the named blocks, as the worker does beside its steps."""
        held = names.held()
        for block, name in [] if held is None else held.pairs():
            self.kept[name] = [*kv[block]]

    def begin(self, message: LoadBlocks, names: BlockNames) -> None:
        """Begin a load, or carry out a drop."""
        if message.dropped:
            dropped = split_names(message.dropped)
            names.forget(dropped)
            self.happened["drops: of a block in the tier"] += any(name in self.kept for name in dropped)
            for name in dropped:
                self.kept.pop(name, None)
            return
        names.expect(message)
        self.loads.append(LoadUnderWay(message))

    def fill(self, load: LoadUnderWay, names: BlockNames, kv: KV, fails: bool) -> None:
        """Fill the next block, or a part of it if that `fails`."""
        left = load.blocks[load.filled :]
        if load.ended or not left:
            return
        (block, name), content = left[0], None
        content = self.kept.get(name)
        if content is None and load.message.peers and self.begin_copy is not None:
            if load.copy is None:
                load.copy = self.begin_copy(name)
                load.ended = load.copy is None
                return
            content, load.copy = load.copy(), None
            self.happened["fetches: blocks"] += content is not None
            self.happened["fetches: a block changed while it was copied"] += content is None

        def write() -> None:
            assert content is not None
            kv[block] = [TORN] * len(content) if fails else [*content]

        filled = content is not None and names.fill(block, load.message.ticket, write)
        self.happened["loads: of a block that was given away"] += content is not None and not filled
        self.happened["loads: a block is torn"] += filled and fails
        load.ended = not filled or fails
        load.filled += not load.ended
        self.happened["loads: blocks"] += not load.ended
