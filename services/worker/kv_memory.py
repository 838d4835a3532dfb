"""KV memory of a rank that outlives its epoch, with the names of the blocks in it (adopted block, docs/invariants.md).

It is memory of this process, or shared memory without a file's name of a keeper (services/kv_keeper.py): then it
outlives the process, too, and the next worker maps it again. Its content is a header, the table of names, the pins of
the scheduler, and the data that the backend takes. It can be left at any byte by a process that is killed: the header
is valid last, an entry of the table counts only while its number is set, which is written after the name and cleared
before the name changes, and pins are written beside those of before, which count until the header says otherwise.
"""

import hashlib
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from protocol.block_names import NAME_BYTES, NamedBlocks, split_names
from protocol.codec import Decoder, ProtocolError, encode, pack, unpack
from protocol.steps import KeepPins, LoadBlocks, ReleaseSlots, SchedulerOutput
from services import release
from services.kv_keeper import KV_KEEPER, KeptMemory

log = logging.getLogger("runahead.worker")

PAGE = mmap.PAGESIZE
MAX_HELD = 1 << 18
"""Maximum number of blocks that are reported; the newest ones."""
SLACK = 16 * PAGE
"""Bytes for the rounding of the parts that are taken."""
_FILLING = threading.Lock()
"""Held while a block is filled for a load, and while blocks are given away."""
_FORMAT = 4
"""Format of the memory."""
_NUMBERS = ("num_blocks", "size", "dropped_in", "pins")
_HEADER = np.dtype([("valid", "<u8"), ("identity", "V32"), *((name, "<u8") for name in _NUMBERS)])
"""`pins`: twice the bytes of the pins, plus 0 or 1: which room they are in. It changes in one write."""
_PINS = Decoder[KeepPins](KeepPins)


class BlockNames:
    """Names of the whole blocks of one rank.

    Args:
        numbers: uint64[blocks]: 1, 2, 3 ... in the order in which the blocks became whole; 0: the block has no name.
        names: uint8[blocks, NAME_BYTES]
        block_size: tokens per block.
        groups: blocks of a request for these tokens (protocol.kv_groups).
    """

    def __init__(self, numbers: NDArray[np.uint64], names: NDArray[np.uint8], block_size: int, groups: int = 1) -> None:
        self._numbers, self._names, self._block_size, self._groups = numbers, names, block_size, groups
        self._last = int(numbers.max(initial=0))
        self._loads = np.zeros(len(numbers), np.int64)
        """Ticket of the load that fills the block; 0: none does."""
        self._completed = np.zeros(len(numbers), np.int64)
        """Step of this epoch that completes the block under its name; 0: the plan of none said so."""
        self.executed = 0
        """The last step that this rank has executed; set on any thread."""
        self._owners = np.ones(len(numbers), np.int64)
        """1, 2, 3 ...: counts how often the block was given away."""

    @classmethod
    def empty(cls, num_blocks: int, block_size: int, groups: int = 1) -> "BlockNames":
        names = np.zeros((num_blocks, NAME_BYTES), np.uint8)
        return cls(np.zeros(num_blocks, np.uint64), names, block_size, groups)

    def follow(self, message: SchedulerOutput | ReleaseSlots) -> None:
        """Apply a message before it is executed: name the blocks that are whole, drop the names of those that the
        step's requests get to write, then name those that the step completes."""
        if (whole := message.whole) is not None:
            blocks = self._name(whole)
            self._numbers[blocks] = np.arange(self._last + 1, self._last + 1 + len(blocks), dtype=np.uint64)
            self._last += len(blocks)
        if isinstance(message, SchedulerOutput):
            if message.block_ids or message.new:
                self.drop(self._assigned(message))
            if message.completes is not None:
                self._completed[self._name(message.completes)] = message.step_id

    def _name(self, named: NamedBlocks) -> NDArray[np.int32]:
        """Give blocks their names, which do not count yet. Return the blocks."""
        blocks = unpack(named.blocks)
        self._numbers[blocks] = self._completed[blocks] = 0
        self._names[blocks] = np.frombuffer(named.names, np.uint8).reshape(-1, NAME_BYTES)
        return blocks

    def drop(self, blocks: Sequence[int] | NDArray[np.int32]) -> None:
        """Remove the names of blocks that are about to be written. No load fills them any more."""
        with _FILLING:
            self._owners[blocks] += 1
            self._numbers[blocks] = self._completed[blocks] = self._loads[blocks] = 0

    def forget(self, names: Sequence[bytes]) -> None:
        """Remove these names: whatever block has one is not found by it any more (dropped block)."""
        for name in names:
            blocks = self._having(name)
            self._numbers[blocks] = self._completed[blocks] = 0

    def forget_all(self) -> None:
        self._numbers[:] = self._completed[:] = 0

    def expect(self, load: LoadBlocks) -> None:
        """Let a load fill its blocks. They have no names until they are whole."""
        blocks = unpack(load.blocks)
        self.drop(blocks)
        self._loads[blocks] = load.ticket

    def fill(self, block: int, ticket: int, write: Callable[[], None]) -> bool:
        """Write a block for a load, on any thread. Return False if the block was given away since."""
        with _FILLING:
            if self._loads[block] != ticket:
                return False
            write()
        return True

    def end_loads(self) -> None:
        """No load fills a block any more."""
        with _FILLING:
            self._loads[:] = 0

    def block_of(self, name: bytes) -> int | None:
        """Return the block that can be read under this name: it is whole, or this rank has executed the step that
        completes it (completed block). May be called on any thread."""
        return next((block for block in self._having(name) if self.owner(block, name)), None)

    def _having(self, name: bytes) -> list[int]:
        """Return the blocks with this name, which may not count yet or any more."""
        beginnings, wanted = self._names.view(np.uint64)[:, 0], np.frombuffer(name, np.uint64, 1)[0]
        found = np.flatnonzero(beginnings == wanted).tolist()
        return [block for block in found if self._names[block].tobytes() == name]

    def owner(self, block: int, name: bytes) -> int:
        """Return a number that stays while the block can be read under this name; 0: it cannot. May be called on any
        thread."""
        owner = int(self._owners[block])
        counts = self._numbers[block] or 0 < self._completed[block] <= self.executed
        is_named = counts and self._names[block].tobytes() == name
        return owner if is_named and owner == self._owners[block] else 0

    def held(self) -> NamedBlocks | None:
        """Return the blocks with a name, in the order in which they became whole; None: there is none."""
        some = np.flatnonzero(self._numbers)
        blocks = some[np.argsort(self._numbers[some])][-MAX_HELD:]
        return NamedBlocks(pack(blocks.astype(np.int32)), self._names[blocks].tobytes()) if len(blocks) else None

    def _assigned(self, step: SchedulerOutput) -> NDArray[np.int32]:
        """int32[blocks]: the blocks that requests get to write. Those of a new one begin where its first row does."""
        assigned = [unpack(step.block_ids)]
        if step.new:
            starts = dict(zip(unpack(step.slots).tolist(), unpack(step.starts).tolist(), strict=True))
            firsts = ((new, starts.get(new.slot, 0) // self._block_size * self._groups) for new in step.new)
            assigned += [unpack(new.block_ids)[first:] for new, first in firsts]
        return np.concatenate(assigned)


class KVMemory:
    """Memory of one rank. It holds the cache of the last epoch that used it, under one identity."""

    def __init__(self, keeper: KeptMemory | None = None) -> None:
        """`keeper`: has the memory, perhaps with the cache of a process that died; None: memory of this process."""
        self.keeper = keeper
        self._claimed = b""
        """Digest of the identity of the memory."""
        self._descriptor = -1
        self._map: mmap.mmap | None = None
        self._taken = 0
        self._parts: list[NDArray[np.uint8]] = []
        """uint8[tables, blocks, bytes]: the parts that were taken."""
        self.names: BlockNames | None = None
        """None: no cache, or one of a backend that keeps none."""
        self._pins: KeepPins | None = None
        self._pin_rooms: NDArray[np.uint8] | None = None
        """uint8[2, bytes]: one for the pins, one for the next ones; None: there is no cache."""
        self.content = ""
        """Everything that the content of a block depends on beside tokens and the values of the weights, set by the
        backend when it has loaded; "": blocks are not in this memory."""
        self._abandoned: KeptMemory | None = None
        """Claim of memory that must not be used by others while this process lives."""

    @classmethod
    def kept(cls, path: str) -> "KVMemory":
        """Return memory of the keeper at `path`, else of the one of this process's starter, else of its own."""
        path = path or os.environ.get(KV_KEEPER, "")
        return cls(KeptMemory(path) if path else None)

    def expect(self) -> None:
        """A model is about to be loaded. Its cache, if one is kept, is not freed meanwhile."""
        if self.keeper is not None:
            with suppress(OSError):  # `find` says so
                self.keeper.connect()

    def find(self, identity: str, block_size: int, groups: int = 1) -> int:
        """Return the number of blocks of the cache with this identity, and 0 if there is none: then free the memory.

        Args:
            identity: everything that the content depends on beside tokens: model, dtype, layout, rank.
            groups: see `BlockNames`
        """
        self._claim(_digest(identity))
        if self._map is not None:
            header = self._header(self._map)
            known = bool(header["valid"]) and header["identity"].tobytes() == _digest(identity)
            if known and int(header["size"]) == len(self._map):
                self._open(block_size, groups)
                return int(header["num_blocks"])
        self._free()
        return 0

    def _claim(self, identity: bytes) -> None:
        """Get the keeper's memory for this identity, unless this process has it."""
        if self.keeper is None or identity == self._claimed:
            return
        self._free()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._claimed = -1, identity
        try:
            self._descriptor = self.keeper.claim(identity)
        except OSError as error:
            log.warning("the KV cache will not outlive this process: no memory of a keeper: %s", error)
            return
        if os.fstat(self._descriptor).st_size >= PAGE:
            self._map = mmap.mmap(self._descriptor, 0)

    @property
    def dropped_in(self) -> int:
        """The epoch of the last drop that this memory has had; 0: it has had none."""
        return 0 if self._map is None else int(self._header(self._map)["dropped_in"])

    def forget(self, drop: LoadBlocks) -> None:
        """Remove the names that are dropped. Memory that the keeper holds without a worker may have them, too (dropped
        block)."""
        if drop.drops_all:
            self.forget_before(drop.epoch)
        elif self._map is not None and self.names is not None:
            self.names.forget(split_names(drop.dropped))
            self._header(self._map)["dropped_in"] = drop.epoch

    def forget_before(self, epoch: int) -> None:
        """Remove all names, because of a drop of this epoch that does not say which, or that this memory has missed."""
        if self._map is not None and self.names is not None:
            self.names.forget_all()
            self._header(self._map)["dropped_in"] = epoch

    @property
    def pins(self) -> KeepPins | None:
        """Pins of the scheduler, for the next one."""
        if self._pins is None and self._map is not None and self._pin_rooms is not None:
            size, room = divmod(int(self._header(self._map)["pins"]), 2)
            with suppress(ProtocolError):  # there are none
                self._pins = _PINS.decode(self._pin_rooms[room, :size].tobytes())
        return self._pins

    @pins.setter
    def pins(self, pins: KeepPins) -> None:
        self._pins = pins
        if self._map is None or self._pin_rooms is None:
            return
        header, frame = self._header(self._map), np.frombuffer(encode(pins), np.uint8)
        if len(frame) > (most := self._pin_rooms.shape[1]):
            log.warning("pins do not outlive this process: there is no room: %d bytes of at most %d", len(frame), most)
            header["pins"] = 0
            return
        room = 1 - int(header["pins"]) % 2
        self._pin_rooms[room, : len(frame)] = frame
        header["pins"] = 2 * len(frame) + room

    def held(self) -> NamedBlocks | None:
        """Return the whole blocks of the cache that was found; None: there is none."""
        return None if self.names is None else self.names.held()

    def begin(self, identity: str, block_size: int, num_blocks: int, bytes_per_block: int, groups: int = 1) -> int:
        """Begin to take the memory of a cache: of the one with this identity, if it has as many blocks, else of a new
        one. Return its number of blocks."""
        if (found := self.find(identity, block_size, groups)) >= num_blocks:
            num_blocks = found
        else:
            self._free()
            size = _data_at(num_blocks) + _up(num_blocks * bytes_per_block) + SLACK
            if self._descriptor >= 0:
                os.ftruncate(self._descriptor, size)
                self._map = mmap.mmap(self._descriptor, size)
            else:
                self._map = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            header = self._header(self._map)
            header["identity"], header["num_blocks"], header["size"] = _digest(identity), num_blocks, size
            self._open(block_size, groups)
            header["valid"] = 1
        self._taken = _data_at(num_blocks)
        self._parts = []
        return num_blocks

    def take(self, num_bytes: int, tables: int = 1) -> memoryview:
        """Return the next part of the memory. It is the same one whenever the same sizes are taken in order.

        Args:
            tables: each has all blocks, in order: one for each layer.
        """
        assert self._map is not None, "begin comes first"
        at, self._taken = self._taken, self._taken + _up(num_bytes)
        if self._taken > len(self._map):
            raise ValueError(f"{num_bytes} bytes are more than the KV memory has left")
        part = memoryview(self._map)[at : at + num_bytes]
        num_blocks = int(self._header(self._map)["num_blocks"])
        self._parts.append(np.frombuffer(part, np.uint8).reshape(tables, num_blocks, -1))
        return part

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all parts that were taken."""
        return sum(part.shape[0] * part.shape[2] for part in self._parts)

    def read_block(self, block: int, into: memoryview) -> None:
        """Copy a block, of `block_bytes`, part after part."""
        for part, copy in self._slices(into):
            np.copyto(copy, part[:, block])

    def write_block(self, block: int, data: memoryview) -> None:
        """Write a block as it was read."""
        for part, copy in self._slices(data):
            np.copyto(part[:, block], copy)

    def _slices(self, data: memoryview) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        at = 0
        for part in self._parts:
            tables, _, num_bytes = part.shape
            end = at + tables * num_bytes
            yield part, np.frombuffer(data[at:end], np.uint8).reshape(tables, num_bytes)
            at = end

    def abandon(self) -> None:
        """Use other memory from now on: a thread that did not end may still write to this one."""
        log.warning("the KV cache is dropped: a step may still write to it")
        if self._map is not None:
            self._header(self._map)["valid"] = 0
        self._map, self.names, self._descriptor, self._parts, self._pin_rooms = None, None, -1, [], None
        self._abandoned, self.keeper = self.keeper, None

    def _open(self, block_size: int, groups: int) -> None:
        assert self._map is not None
        n = int(self._header(self._map)["num_blocks"])
        numbers = np.frombuffer(self._map, np.uint64, n, PAGE)
        names = np.frombuffer(self._map, np.uint8, n * NAME_BYTES, PAGE + _up(8 * n))
        self._pin_rooms = np.frombuffer(self._map, np.uint8, _pin_bytes(n), _data_at(n) - _pin_bytes(n)).reshape(2, -1)
        self.names = BlockNames(numbers, names.reshape(n, NAME_BYTES), block_size, groups)

    def _free(self) -> None:
        """Give the memory back. Nobody reads the cache any more."""
        self._map, self.names, self._parts, self._pin_rooms = None, None, [], None
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)

    @staticmethod
    def _header(memory: mmap.mmap) -> NDArray[np.void]:
        return np.frombuffer(memory, _HEADER, 1)[0]  # a record, which refers to the memory


def _digest(identity: str) -> bytes:
    """The memory may be that of another release."""
    return hashlib.sha256(f"{_FORMAT} {release.version()} {identity}".encode()).digest()


def _pin_bytes(num_blocks: int) -> int:
    """Return the bytes of both rooms for pins. Those of different prefixes fit; only pages that are written take
    memory."""
    return 2 * (_up(2 * NAME_BYTES * num_blocks) + 64 * PAGE)


def _data_at(num_blocks: int) -> int:
    """Return where the data begins: behind the header, the table of names, and the pins."""
    return PAGE + _up(8 * num_blocks) + _up(NAME_BYTES * num_blocks) + _pin_bytes(num_blocks)


def _up(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE
