"""Block tables by slot, and the prefix cache over them.

A block's hash chains over every token before it, starting with the request's salt; equal hashes mean equal prefixes. A
block enters the cache when the step that writes it is about to be dispatched and its tokens are known (`register`,
eager registration), or when a result has confirmed them (`commit`, confirmed registration). The planner chooses a step
first and commits it as a whole, so the cache never refers to a block that no step writes.

A cached block is *whole* when confirmed steps have written all of it. The workers are sent its hash then, which is the
block's name, and the next epoch begins with the whole blocks that they still hold (adopted block).

A model may have several groups of layers (protocol.kv_groups). A table has the blocks of all groups, position after
position; all groups cover the same tokens. A group that reads a window has no blocks behind it: they leave the table
when no committed position reads them any more (blocks behind the window), and a prefix is a hit without them. The
recurrent states of a request have a block of each of their groups from its first step on; its tokens before are in no
other block, so no prefix is a hit (recurrent state).
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import groupby, islice

import numpy as np

from protocol.block_names import NamedBlocks, extend_names
from protocol.columns import has_any, total
from protocol.kv_groups import NO_BLOCK, name_in_group, num_states
from protocol.media import contents
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import BlocksCached, BlocksEvicted, Observers
from services.scheduler.core.pins import Pins
from services.scheduler.core.request import Request
from services.scheduler.core.slots import Column, SlotColumns, SlotIds


class KVCacheManager:
    def __init__(self, slots: SlotColumns, limits: Limits, observers: Observers, pins: Pins) -> None:
        self.block_size = limits.block_size
        self.pool = BlockPool(limits.num_blocks)
        self.pins = pins
        self.num_states = num_states(limits.groups)
        groups = [group for group in limits.groups if not group.is_state]
        self.enable_prefix_caching = limits.enable_prefix_caching and not self.num_states
        self._slots, self._observers = slots, observers
        self.num_groups = len(groups)
        """Groups with keys."""
        self._full = [number for number, group in enumerate(groups) if not group.size]
        self._windows = [(number, group) for number, group in enumerate(groups) if group.size]
        self.emitted_group = self._full[0] if self._full else 0
        """The group whose blocks are emitted, where possible one that keeps every token."""
        self.emitted = bytearray(b"\1" * limits.num_blocks)
        """1: the block is of that group, or was last."""
        self.tables: list[list[int]] = [[] for _ in range(slots.num_slots)]
        """Entry i is the block of group i % num_groups for the tokens from i // num_groups * block_size on; NO_BLOCK
        behind the group's window."""
        self.states: list[list[int]] = [[] for _ in range(slots.num_slots)]
        """Blocks with the recurrent states of each slot."""
        self._whole: list[int] = []
        """Blocks that became whole since `take_whole`."""
        self._unseen: set[int] = set()
        """Adopted blocks that were not emitted so far."""

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0 to 1."""
        return 1 - self.pool.num_free / self.pool.num_blocks

    def find_prefix(self, request: Request) -> list[int]:
        """Return the table of the longest prefix that every group can serve, without the request's last token: the
        logits of that one are needed, so it is always computed."""
        if not (self.enable_prefix_caching and request.reads_prefix_cache):
            return []
        tokens = request.token_ids
        most = (len(tokens) - 1) // self.block_size
        self.extend_hashes(request, tokens, most)
        return self.prefix_of(request.block_hashes[:most])

    def prefix_of(self, names: list[bytes]) -> list[int]:
        """Return the table of the longest prefix of the blocks with these names that every group can serve."""
        if self.num_groups > 1 or self._windows:
            return self._longest_prefix(names)
        blocks = []
        for name in names:
            block = self.pool.by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _longest_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the table of the longest prefix that all groups can serve: of a group with a window, only the blocks
        that the first query behind the prefix reads must exist."""
        by_hash, size, end, before = self.pool.by_hash, self.block_size, len(hashes), -1

        def block(index: int, group: int) -> int:
            return by_hash.get(name_in_group(hashes[index], group), NO_BLOCK)

        for number in self._full:
            end = next((index for index in range(end) if block(index, number) < 0), end)
        while end != before:  # what one group lacks may shorten the prefix to one that another cannot serve
            before = end
            for number, group in self._windows:
                read = range(group.first_read(end * size) // size, end)
                while (gap := next((i for i in reversed(read) if block(i, number) < 0), None)) is not None:
                    end = gap
                    read = range(group.first_read(end * size) // size, end)
        firsts = [0] * self.num_groups
        for number, group in self._windows:
            firsts[number] = group.first_read(end * size) // size
        return [
            block(index, number) if index >= first else NO_BLOCK
            for index in range(end)
            for number, first in enumerate(firsts)
        ]

    def covered(self, prefix: Sequence[int]) -> int:
        """Return the tokens that the table of a prefix covers."""
        return len(prefix) // self.num_groups * self.block_size

    def shortened(self, request: Request, prefix: list[int], num_tokens: int) -> list[int]:
        """Return the table of the longest prefix of at most `num_tokens` that all groups can serve; `prefix` is the
        request's longest one."""
        blocks = num_tokens // self.block_size
        if self._windows and num_tokens < self.covered(prefix):
            return self._longest_prefix(request.block_hashes[:blocks])
        return prefix[: blocks * self.num_groups]

    def num_missing(self, prefix: list[int], num_tokens: int) -> int:
        """Return how many free blocks a new request takes that holds `num_tokens` and starts with `prefix`."""
        held = sum(block < 0 or self.pool.refs[block] > 0 for block in prefix)
        return self.num_states + -(-num_tokens // self.block_size) * self.num_groups - held

    def adopt(self, slot: int, prefix: list[int]) -> None:
        """Start the slot's table with cached blocks, and take those of its states."""
        self.pool.hold(block for block in prefix if block >= 0)
        self.states[slot] = self.pool.take(self.num_states)
        self.tables[slot] = list(prefix)
        covered = self.covered(prefix)
        self._slots.capacity[slot] = covered
        self._slots.next_commit[slot] = covered + self.block_size
        self._slots.next_whole[slot] = self.block_size  # the requests that wrote the prefix may have left
        if self._windows:
            self._slots.next_unread[slot] = self._next_unread(covered)
        if self._unseen and self._observers.blocks:
            self._emit_cached(self._slots.request(slot), slot, 0, len(prefix) // self.num_groups, is_hit=True)

    def reserve(self, prefix: list[int], count: int) -> list[int]:
        """Take `count` free blocks that a tier fills, and hold the cached blocks before them; the caller has checked
        that they exist."""
        self.pool.hold(prefix)
        if self._observers.blocks:
            self._emit_evicted(count)
        return self.pool.take(count)

    def end_reservation(self, prefix: list[int], blocks: list[int], names: list[bytes]) -> None:
        """Free reserved blocks. Those at the beginning that have names are filled and can be found (loaded block)."""
        for block, name in zip(blocks, names, strict=False):
            self.pool.register(block, name)
            if self.pool.hash_of[block] is not None:
                self.pool.whole[block] = 1
                self._whole.append(block)
                if self._observers.blocks:
                    self._unseen.add(block)
        self.pool.give_back(reversed(prefix + blocks))

    def missing(self, slots: SlotIds, num_tokens: Column) -> Column | None:
        """Blocks that each slot lacks to hold `num_tokens` tokens, int32[rows]; None: no slot lacks any."""
        lacking = num_tokens - self._slots.capacity[slots]
        if not has_any(lacking > 0):
            return None
        np.maximum(lacking, 0, out=lacking)
        lacking += self.block_size - 1
        lacking //= self.block_size
        lacking *= self.num_groups
        return lacking

    def grow(self, rows: SlotIds, counts: Column) -> list[int]:
        """Append `counts[i]` fresh blocks, equally many of each group, to the table of `rows[i]`; the caller has
        checked that they exist. Return the blocks, row after row."""
        num_blocks = total(counts)
        if self._observers.blocks:
            self._emit_evicted(num_blocks)
        blocks = self.pool.take(num_blocks)
        self._slots.capacity[rows] += counts // self.num_groups * self.block_size
        if self.num_groups > 1:
            for at, block in enumerate(blocks):
                self.emitted[block] = at % self.num_groups == self.emitted_group
        at = 0
        for slot, count in zip(rows.tolist(), counts.tolist(), strict=True):
            self.tables[slot] += blocks[at : at + count]
            at += count
        return blocks

    def register(self, rows: SlotIds, frontiers: Column) -> None:
        """Make the full blocks of the first `frontiers[i]` tokens of `rows[i]` findable. These tokens are known, and
        written before any reader can read them. Only rows that crossed a block boundary cost anything."""
        crossed = frontiers >= self._slots.next_commit[rows]
        if not (self.enable_prefix_caching and has_any(crossed)):
            return
        rows, size, register = rows[crossed], self.block_size, self.pool.register
        lasts = frontiers[crossed] // size
        firsts = self._slots.next_commit[rows] // size - 1
        self._slots.next_commit[rows] = (lasts + 1) * size
        history, is_single = self._slots.history, self.num_groups == 1
        for slot, first, last in zip(rows.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            request, table = self._slots.request(slot), self.tables[slot]
            hashes = request.block_hashes
            # The usual case: a decode filled one more block
            if len(hashes) == last - 1 and hashes and request.media is None:
                newest = history[slot, (last - 1) * size : last * size].tobytes()
                hashes.append(sha256(hashes[-1] + newest).digest())
            elif len(hashes) < last:
                self.extend_hashes(request, history[slot], last)
            if is_single:
                for index in range(first, last):
                    register(table[index], hashes[index])
            else:
                self._register_groups(table, hashes, first, last)
            if self._observers.blocks:
                self._emit_cached(request, slot, first, last)

    def _register_groups(self, table: list[int], hashes: list[bytes], first: int, last: int) -> None:
        for at in range(first * self.num_groups, last * self.num_groups):
            index, group = divmod(at, self.num_groups)
            self.pool.register(table[at], name_in_group(hashes[index], group))

    def _emit_cached(self, request: Request, slot: int, first: int, last: int, is_hit: bool = False) -> None:
        """Emit those blocks `first` .. `last - 1` of a slot that are cached, run after run; an equal block of another
        request may have been cached before. Adopted blocks are emitted when the first request meets them. Of several
        groups, those of `emitted_group` are emitted.

        Args:
            is_hit: the request found them, so that all others were emitted before.
        """
        hashes, table = request.block_hashes, self.tables[slot][self.emitted_group :: self.num_groups]
        size, unseen = self.block_size, self._unseen
        names = [name_in_group(name, self.emitted_group) for name in hashes[first:last]]
        found = [(first + at, self.pool.by_hash.get(name)) for at, name in enumerate(names)]
        cached = [index for index, block in found if block in unseen or (block == table[index] and not is_hit)]
        unseen.difference_update(block for _, block in found if block is not None)
        for _, run in groupby(enumerate(cached), lambda pair: pair[1] - pair[0]):
            indices = [index for _, index in run]
            begin, end = indices[0], indices[-1] + 1
            tokens = self._slots.history[slot, begin * size : end * size].copy()
            parent = hashes[begin - 1] if begin else None
            found_names, salt, lora = tuple(hashes[begin:end]), request.cache_salt, request.lora
            seen = [contents(request.items, at * size, (at + 1) * size) for at in indices if request.items]
            self._observers.emit(BlocksCached(found_names, parent, tokens, size, salt, lora, tuple(seen)))

    def _emit_evicted(self, num_blocks: int) -> None:
        """Emit the blocks that leave the cache if `num_blocks` are taken now."""
        evicted = [*islice(self.pool.cached, max(num_blocks - len(self.pool.blank), 0))]
        known = (self.pool.hash_of[block] for block in evicted if block not in self._unseen and self.emitted[block])
        hashes = tuple(name_in_group(name, self.emitted_group) for name in known if name is not None)
        self._unseen.difference_update(evicted)
        if hashes:
            self._observers.emit(BlocksEvicted(hashes))

    def commit(self, rows: SlotIds) -> None:
        """Register what results have confirmed, without tokens behind the end of a request, then free the blocks behind
        windows. Only rows that crossed a block boundary cost anything."""
        tokens, next_whole = self._slots.tokens[rows], self._slots.next_whole[rows]
        if not (self._windows or has_any(tokens >= next_whole)):  # usually; no more than these are confirmed
            return
        confirmed = np.minimum(self._slots.committed(rows), tokens)
        crossed = confirmed >= next_whole
        if self.enable_prefix_caching and has_any(crossed):
            full, frontiers = rows[crossed], confirmed[crossed]
            self.register(full, frontiers)
            self.note_whole(full, frontiers)
        if self._windows:
            self.free_unread(rows, confirmed)

    def free_unread(self, rows: SlotIds, committed: Column) -> None:
        """Free the blocks behind the windows of `rows[i]`, of which `committed[i]` positions are committed. Every query
        in flight or to come has a position from there on, whatever is rejected or left out (blocks behind the window).
        """
        due = committed >= self._slots.next_unread[rows]
        for slot, position in zip(rows[due].tolist(), committed[due].tolist(), strict=True):
            table, unread = self.tables[slot], []
            for number, group in self._windows:
                at = group.first_read(position) // self.block_size * self.num_groups + number
                while (at := at - self.num_groups) >= 0 and table[at] >= 0:
                    unread.append(table[at])
                    table[at] = NO_BLOCK
            self.pool.give_back(unread)
            self._slots.next_unread[slot] = self._next_unread(position)

    def _next_unread(self, committed: int) -> int:
        """Return the committed position from which another block is behind a window."""
        size = self.block_size
        ends = ((group, (group.first_read(committed) // size + 1) * size) for _, group in self._windows)
        return min(group.unread_from(end) for group, end in ends)

    def note_whole(self, rows: SlotIds, confirmed: Column) -> None:
        """Note which blocks are whole: confirmed steps have written the first `confirmed[i]` tokens of `rows[i]`."""
        size, pool = self.block_size, self.pool
        tables, whole, hash_of, became = self.tables, pool.whole, pool.hash_of, self._whole
        lasts, firsts = confirmed // size, self._slots.next_whole[rows] // size - 1
        self._slots.next_whole[rows] = (lasts + 1) * size
        if self.num_groups > 1:
            firsts, lasts = firsts * self.num_groups, lasts * self.num_groups
        for slot, first, last in zip(rows.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
            for block in tables[slot][first:last]:
                if not whole[block] and hash_of[block] is not None:  # NO_BLOCK has no hash
                    whole[block] = 1
                    became.append(block)

    def take_whole(self) -> NamedBlocks | None:
        """Return the blocks to name on the workers since the last call; None: there is none."""
        became, pool = self._whole, self.pool
        if not became:
            return None
        self._whole = []
        blocks = [block for block in became if pool.whole[block]]  # others were evicted since
        names = [pool.hash_of[block] or b"" for block in blocks]
        return NamedBlocks.from_lists(blocks, names) if blocks else None

    def take_completed(self, is_wanted: bool) -> NamedBlocks | None:
        """Return the blocks, with their names, that the next step to be sent completes at the latest, and that are not
        whole; None: there is none, or they are not wanted."""
        pool, named = self.pool, self.pool.named
        if not named:
            return None
        pool.named = []
        pairs = ((block, pool.hash_of[block]) for block in named if not pool.whole[block])
        names = {block: name for block, name in pairs if is_wanted and name is not None}  # others were evicted
        return NamedBlocks.from_lists([*names], [*names.values()]) if names else None

    def begin_with(self, held: NamedBlocks) -> None:
        """Start an epoch with the whole blocks that its workers hold."""
        if self.enable_prefix_caching:
            self.pool.adopt(held.pairs())
            self._unseen = set(self.pool.cached)
            self.pins.hold(self)

    def forget_all(self) -> None:
        """Empty the prefix cache; held blocks stay with their holders, except those of pins."""
        self.pins.release(self)
        self.pool.forget_all()
        self._whole = []
        self._unseen.clear()

    def drop(self, names: Sequence[bytes]) -> int:
        """Remove the blocks with these names from the prefix cache (dropped block). Return their number."""
        self.pins.release(self)
        found = [(name, self.pool.by_hash.get(name)) for name in names]
        known = [(name, block) for name, block in found if block is not None]
        if self._observers.blocks:
            emitted = [name for name, block in known if block not in self._unseen and self.emitted[block]]
            if emitted:
                self._observers.emit(BlocksEvicted(tuple(name_in_group(name, self.emitted_group) for name in emitted)))
        for _, block in known:
            self._unseen.discard(block)
            self.pool.drop(block)
        self.pins.hold(self)
        return len(known)

    def release(self, slot: int) -> None:
        """Free the slot's blocks; no step in flight may write them any more (the fence)."""
        if len(self.pins):
            self.pins.hold(self)
        self.pool.give_back(block for block in reversed(self.tables[slot]) if block >= 0)
        self.pool.give_back(self.states[slot])
        self.tables[slot], self.states[slot] = [], []

    def extend_hashes(self, request: Request, tokens: Column, num_blocks: int) -> None:
        """Compute the request's block hashes up to `num_blocks`."""
        names, size = request.block_hashes, self.block_size
        unnamed = tokens[len(names) * size : num_blocks * size].tobytes()
        extend_names(names, request.cache_salt, unnamed, size, request.items)
