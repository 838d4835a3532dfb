"""Blocks on their way between the KV memory of a rank and its tiers, in one epoch (loaded block, docs/invariants.md).

Two threads beside the steps. One writes the blocks that became whole: it copies a block and then looks whether the
block still has the owner that it had before, because a step may write a block only after it has lost its name. The
other one fills the blocks of loads, each under the lock that a plan takes to give blocks away. Blocks that come faster
than they are written are left out.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from protocol.block_names import NamedBlocks, split_names
from protocol.codec import ProtocolError, unpack
from protocol.kv_transfer import MAX_FETCH_BYTES
from protocol.steps import BlocksLoaded, LoadBlocks
from services.process import name_this_thread
from services.worker.kv_memory import KVMemory
from services.worker.tiers.disk import DiskTier
from services.worker.tiers.host import HostTier
from services.worker.tiers.peers import PeerClient

log = logging.getLogger("runahead.worker")

MAX_UNWRITTEN = 4096
"""Maximum number of blocks that wait to be written."""


Tier = HostTier | DiskTier
"""Blocks by name. `get` is called on other threads than the rest, which begins with `begin` in each epoch. It returns
False for a block that is missing or wrong; `put` keeps one if possible."""


@dataclass
class DroppedNames:
    """Drops under way, shared by the transfers of all epochs: the last ones may still carry them out."""

    names: dict[bytes, LoadBlocks] = field(default_factory=dict)
    """Names of blocks that the tiers may still have, and that nobody may read, each with its last drop."""
    writer: threading.Thread | None = None
    """The last thread that writes: the next one begins when it has ended."""

    def begin(self, message: LoadBlocks) -> None:
        """Nobody reads the blocks of this drop from now on."""
        self.names.update(dict.fromkeys(split_names(message.dropped), message))

    def carry_out(self, message: LoadBlocks, tiers: Sequence[Tier]) -> BlocksLoaded:
        """Remove the blocks of a drop from tiers. Return the answer. Blocks whose files cannot be removed stay here."""
        names, failed, why = split_names(message.dropped), set[bytes](), ""
        for name in names:
            for tier in tiers:
                try:
                    tier.drop(name)
                except OSError as error:
                    failed.add(name)
                    why = str(error)
            if name not in failed and self.names.get(name) is message:
                del self.names[name]
        if failed:
            log.error("%d of %d KV blocks cannot be dropped from a tier: %s", len(failed), len(names), why)
        return BlocksLoaded(message.epoch, message.ticket, 0, num_failed=len(failed))


class BlockTransfers:
    """
    Args:
        memory: with a cache that has begun.
        tiers: the fastest one first.
        send: sends the answer to a load, on any thread.
        peers: workers of other engines; None: none is asked. It is closed at the end.
        dropped: shared with the transfers of other epochs; None: there are none.
    """

    def __init__(
        self,
        memory: KVMemory,
        tiers: Sequence[Tier],
        send: Callable[[BlocksLoaded], None],
        peers: PeerClient | None = None,
        dropped: DroppedNames | None = None,
    ) -> None:
        assert memory.names is not None, "the cache has begun"
        self._memory, self._names, self._tiers = memory, memory.names, tiers
        self._block_bytes = memory.block_bytes
        self._send, self._peers = send, peers
        self._dropped = DroppedNames() if dropped is None else dropped
        self._unwritten: SimpleQueue[bytes | LoadBlocks | None] = SimpleQueue()
        """Names of blocks to write, and drops, in order."""
        self._loads: SimpleQueue[LoadBlocks | None] = SimpleQueue()
        self._in_memory = threading.Lock()
        """Held while a thread reads or writes the KV memory."""
        self._ended = False
        self._threads = [
            threading.Thread(target=self._write_blocks, name="blocks out", daemon=True),
            threading.Thread(target=self._fill_blocks, name="blocks in", daemon=True),
        ]
        self._writer_before, self._dropped.writer = self._dropped.writer, self._threads[0]
        for thread in self._threads:
            thread.start()

    def follow(self, whole: NamedBlocks) -> None:
        """Blocks became whole, and have their names."""
        room = MAX_UNWRITTEN - self._unwritten.qsize()
        for name in split_names(whole.names)[: max(room, 0)]:
            self._unwritten.put(name)

    def load(self, message: LoadBlocks) -> None:
        self._names.expect(message)
        self._loads.put(message)

    def drop(self, message: LoadBlocks) -> None:
        """Remove blocks from the tiers, and answer. Nobody reads them from now on."""
        self._dropped.begin(message)
        self._unwritten.put(message)

    def end(self, patience: float = 0.0) -> None:
        """Leave the KV memory alone from now on.

        Args:
            patience: seconds for blocks that are not written yet.
        """
        self._unwritten.put(None)
        self._loads.put(None)
        if patience:
            self._threads[0].join(patience)
        with self._in_memory:
            self._ended = True
        self._names.end_loads()

    def find(self, names: Sequence[bytes]) -> tuple[int, memoryview]:
        """Return the first blocks of these that are in the memory or in a tier: their number and data. For a thread of
        its own. Raises: ProtocolError, if they are too many."""
        size = self._block_bytes
        if len(names) > max(1, MAX_FETCH_BYTES // size):
            raise ProtocolError(f"{len(names)} blocks of {size} bytes are more than one answer")
        data = memoryview(bytearray(len(names) * size))
        for count, name in enumerate(names):
            part = data[count * size : (count + 1) * size]
            if not (self._copy(name, part) or self._read(name, part)):
                return count, data[: count * size]
        return len(names), data

    def _copy(self, name: bytes, into: memoryview) -> bool:
        """Copy a block out of the memory. Return False if it is not there, or has lost its name meanwhile."""
        block = self._names.block_of(name)
        if block is None or not (owner := self._names.owner(block, name)):
            return False
        with self._in_memory:
            if self._ended:
                return False
            self._memory.read_block(block, into)
        return self._names.owner(block, name) == owner

    # -- out -----------------------------------------------------------------------------------------------------

    def _write_blocks(self) -> None:
        name_this_thread()
        buffer = memoryview(bytearray(self._block_bytes))
        if self._writer_before is not None:
            self._writer_before.join()
        for tier in self._tiers:
            tier.begin()
        while (item := self._unwritten.get()) is not None:  # drops are carried out after the end, too
            if isinstance(item, bytes):
                self._write(item, buffer)
            else:
                self._send(self._dropped.carry_out(item, self._tiers))

    def _write(self, name: bytes, buffer: memoryview) -> None:
        if self._ended:
            return
        lacking = [tier for tier in self._tiers if not tier.has(name)]
        if lacking and self._copy(name, buffer):
            for tier in lacking:
                tier.put(name, buffer)

    # -- in ------------------------------------------------------------------------------------------------------

    def _fill_blocks(self) -> None:
        name_this_thread()
        buffer = memoryview(bytearray(self._block_bytes))
        while (message := self._loads.get()) is not None and not self._ended:
            sources = self._fill(message, buffer)
            self._send(BlocksLoaded(message.epoch, message.ticket, sources.total(), dict(sources)))
        if self._peers is not None:
            self._peers.close()

    def _fill(self, message: LoadBlocks, buffer: memoryview) -> Counter[str]:
        """Return the number of blocks that were filled, by their source: the tiers, and behind the first one that they
        lack another engine."""
        blocks, names, sources = unpack(message.blocks).tolist(), split_names(message.names), Counter[str]()
        for block, name in zip(blocks, names, strict=False):
            if (source := self._read(name, buffer)) is None:
                break
            if not self._put(block, message.ticket, buffer):
                return sources
            sources[source] += 1
        count = sources.total()
        if count < len(blocks) and message.peers and self._peers is not None:
            for data in self._peers.fetch(message.peers, names[count:], self._block_bytes):
                if not self._put(blocks[count], message.ticket, data):
                    break
                count += 1
                sources["peer"] += 1
        return sources

    def _read(self, name: bytes, into: memoryview) -> str | None:
        """Read a block from the first tier that has it. Return that one's label; None: none has it."""
        if name in self._dropped.names:
            return None
        return next((tier.label for tier in self._tiers if tier.get(name, into)), None)

    def _put(self, block: int, ticket: int, data: memoryview) -> bool:
        """Write a block. Return False if it was given away, or the epoch has ended."""
        with self._in_memory:
            return not self._ended and self._names.fill(block, ticket, lambda: self._memory.write_block(block, data))
