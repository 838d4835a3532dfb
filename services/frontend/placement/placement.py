"""The placement core: events of engines and requests in, decisions out. No sockets, no clock.

docs/placement.md describes it; its rules are in docs/invariants.md, section "Placement".
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.block_names import TOKEN_BYTES
from services.frontend.placement.block_index import BlockIndex
from services.frontend.placement.decisions import (
    MAY_SERVE,
    MOVES_STREAMS,
    Condition,
    Decision,
    EngineReport,
    Hold,
    LoadAhead,
    Move,
    Place,
    Reason,
    RefuseRequest,
    Role,
)
from services.frontend.placement.fleet import NO_LONGER_SLOW, EngineColumns, Rows
from services.frontend.placement.policies import GuardedPlacementPolicy, PlacementView, find_placement_policy
from services.frontend.placement.prefix_names import PrefixNames
from services.frontend.placement.records import PlacementStarted, Recorder, recorded

SLOW_CHECK = 1.0
"""Seconds between two checks for slow engines."""
GOLDEN = 0x9E3779B97F4A7C15
"""Golden ratio of 2**64: its multiples are spread evenly."""
LOST_SECONDS, MOVED_SECONDS = 1.0, 0.25
"""Seconds of recomputation that an engine is given at once by streams of lost engines, and of engines that execute them
still."""
SHARE = 0.5
"""Share of an engine's time that recomputation of streams may take whose engines execute them still."""
PREFILL_TOKENS = 512
"""Prompt tokens that must be computed from which an engine of the role `prefill` gets a request. Fewer delay the
streams of a decoding engine by about one step."""
REST = 30.0
"""Seconds that a stream stays on an engine at least, before it leaves it for being slow."""


@dataclass(slots=True)
class PlacedStream:
    key: int
    row: int
    """Its engine in the fleet."""
    identity: str
    """Identity of the engine when the stream was placed: the model of its tokens."""
    num_tokens: int
    names: Mapping[int, Sequence[bytes]]
    since: float
    """When it was placed or moved here, monotonic seconds."""
    left: frozenset[str] = frozenset()
    """Engines that it left because they were slow. It does not return to them for that reason."""
    refused: frozenset[str] = frozenset()
    """Engines that refuse it for good."""
    next_row: int = -1
    """The engine that fetches the blocks of its prompt while they are computed; -1: none does."""


class Placement:
    """Engines by name, and where each open request of this frontend is placed."""

    def __init__(
        self, policy: str = "prefix_aware", max_blocks: int = 2**18, seed: int = 0, record: Recorder | None = None
    ) -> None:
        """`seed`: decides between equal engines; each frontend takes another one. `max_blocks`: names of blocks that
        the index keeps at least; twice as many, and those of one event, at most.

        Raises: PluginError, if there is no such policy
        """
        self._max_blocks = max_blocks
        self._policy = GuardedPlacementPolicy(find_placement_policy(policy))
        self.uses_prefixes = self._policy.uses_prefixes
        """False: what engines hold plays no role."""
        self.record = record
        self._now = 0.0
        self._fleet = EngineColumns()
        self._index = BlockIndex(max_blocks)
        self._prefixes: dict[int, PrefixNames] = {}
        self._streams: dict[int, PlacedStream] = {}
        self._streams_of: dict[int, dict[int, PlacedStream]] = {}
        """By row, oldest first."""
        self._leaving: dict[int, Reason] = {}
        """Rows whose streams move."""
        self._removed: set[int] = set()
        """Rows of engines that are listed no longer and have streams."""
        self._slow_checked = -math.inf
        self._count = seed * GOLDEN % 2**32
        if record is not None:
            record(PlacementStarted(policy, seed, max_blocks))

    @property
    def num_block_names(self) -> int:
        """Names of blocks in the index of what engines hold; some are counted twice."""
        return self._index.num_stored

    # -- events --------------------------------------------------------------------------------------------------------

    @recorded("advanced")
    def advance(self, now: float) -> None:
        """Set the time, monotonic seconds. Call it regularly, and before other events. A time before the last one is
        ignored."""
        self._now = max(now, self._now)

    @recorded("engine")
    def on_engine(self, name: str, report: EngineReport) -> None:
        """An engine is new, or there is a later report. Call it about every second for each engine."""
        if (row := self._fleet.report(name, report)) >= 0:
            self._set_leaving(row, report.condition)
        if self._removed:
            self._removed.discard(self._fleet.row_of[name])

    @recorded("engine_removed")
    def on_engine_removed(self, name: str) -> None:
        """An engine is listed no longer. Its streams move. Unknown names are ignored."""
        if (row := self._fleet.row_of.get(name)) is not None:
            gone = EngineReport(Condition.GONE)
            self._fleet.report(name, gone)
            self._removed.add(row)
            self._set_leaving(row, gone.condition)
            self._drop(row)

    @recorded("blocks_stored")
    def on_blocks_stored(self, name: str, block_names: Sequence[bytes]) -> list[LoadAhead]:
        """An engine's prefix cache has these blocks, named as by `protocol.block_names`. Return which of them are of
        prompts that it computes for other engines."""
        if (row := self._fleet.row_of.get(name)) is None:
            return []
        self._index.add(row, block_names)
        return [*self._loads_ahead(row, block_names)]

    @recorded("blocks_removed")
    def on_blocks_removed(self, name: str, block_names: Sequence[bytes]) -> None:
        """An engine's prefix cache has these blocks no longer."""
        if (row := self._fleet.row_of.get(name)) is not None:
            self._index.remove(row, block_names)

    @recorded("blocks_cleared")
    def on_blocks_cleared(self, name: str) -> None:
        """An engine's prefix cache is empty: it has started again, or its events were missed."""
        if (row := self._fleet.row_of.get(name)) is not None:
            self._index.clear(row)

    @recorded("refusals_forgotten")
    def forget_refusals(self, name: str) -> None:
        """An engine has other settings now: streams that it has refused may move there."""
        for stream in self._streams.values():
            stream.refused -= {name}

    @recorded("ended")
    def on_ended(self, key: int) -> None:
        """A request has ended. Unknown keys are ignored."""
        self._end(key)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def place(
        self,
        key: int,
        token_bytes: bytes,
        salt: str = "",
        identity_required: str = "",
        refused: tuple[str, ...] = (),
        for_good: tuple[str, ...] = (),
    ) -> Decision:
        """Choose the engine of a request. A key that is placed already is placed anew.

        Args:
            token_bytes: int32[...], little-endian: the prompt, and output that was delivered already.
            identity_required: identity of the engine that has sent output of this request; "": any engine will do.
            refused: engines that are not chosen.
            for_good: those of them that would refuse the request again: it moves to none of these. If there are any,
                it goes back to an engine that drains while no other one is ready.
        """
        names = {}
        if self.uses_prefixes and len(self._fleet.row_of) > 1:
            for size in self._fleet.candidates(identity_required).block_sizes:
                names[size] = self._prefix_names(size).of(token_bytes, salt)
        return self.place_named(key, len(token_bytes) // TOKEN_BYTES, names, identity_required, refused, for_good)

    @recorded("request")
    def place_named(
        self,
        key: int,
        num_tokens: int,
        names: Mapping[int, Sequence[bytes]],
        identity_required: str,
        refused: tuple[str, ...] = (),
        for_good: tuple[str, ...] = (),
    ) -> Decision:
        """`place` for a prompt of which only the names of prefixes are known, by block size; see `PrefixNames.of`."""
        self._end(key)
        excluded = {self._fleet.row_of.get(name) for name in refused}
        for condition in (Condition.READY, Condition.DRAINING) if for_good else (Condition.READY,):
            rows = self._fleet.candidates(identity_required, condition).rows
            rows = rows[[row not in excluded for row in rows]] if excluded else rows
            if len(rows):
                return self._place(key, num_tokens, names, rows, frozenset(for_good))
        return self._no_engine(identity_required, excluded)

    @recorded("moves_requested")
    def moves(self) -> list[Move]:
        """Return the streams that move now. Call it regularly, and when the condition of an engine has changed."""
        if self._now - self._slow_checked >= SLOW_CHECK:
            self._slow_checked = self._now
            self._fleet.mark_slow(self._now)
        found: list[Move] = []
        leaving = [*self._leaving.items(), *((row, Reason.SLOW) for row in sorted(self._fleet.slow))]
        for reason in (Reason.LOST, Reason.DRAINING, Reason.SLOW):
            for row, why in leaving:
                if why is reason:
                    self._move_from(row, reason, found)
        return found

    @recorded("prefilled")
    def prefilled(self, key: int) -> Move | None:
        """The engine of a request has computed its prompt, and does no more than that. Return where it goes on: at an
        engine that decodes, or at the same one if none does. None: the key is unknown."""
        if (stream := self._streams.get(key)) is None:
            return None
        source, rows = stream.row, self._fleet.candidates(stream.identity).rows
        targets, computing = self._fleet.by_role(rows)
        if len(computing):
            self._take_from(stream)
            self._put(stream, self._next_row(stream, targets), stream.num_tokens)
        return Move(key, self._fleet.names[source], self._fleet.names[stream.row], Reason.PREFILLED)

    def _loads_ahead(self, row: int, block_names: Sequence[bytes]) -> Iterator[LoadAhead]:
        report = self._fleet.reports[row]
        if report.role is not Role.PREFILL:
            return
        stored = {*block_names}
        for stream in self._streams_of.get(row, {}).values():
            names = stream.names.get(report.block_size, ())
            if stored.isdisjoint(names):  # the fast way to see that its prompt is not computed now
                continue
            complete = next(count for count in range(len(names), 0, -1) if names[count - 1] in stored)
            targets, computing = self._fleet.by_role(self._fleet.candidates(stream.identity).rows)
            if row in computing:
                stream.next_row = self._next_row(stream, targets)
                num_tokens = self._prefix_names(report.block_size).num_tokens(complete)
                yield LoadAhead(stream.key, self._fleet.names[stream.next_row], num_tokens)

    def _next_row(self, stream: PlacedStream, targets: Rows) -> int:
        """Return where a stream goes on whose prompt is computed; one that has fetched blocks of it comes first."""
        if stream.next_row in targets:
            return stream.next_row
        if len(targets) == 1:
            return int(targets[0])
        return int(targets[self._choose(targets, stream.num_tokens, self._hits(targets, stream.names))])

    # -- placing -------------------------------------------------------------------------------------------------------

    def _place(
        self, key: int, num_tokens: int, names: Mapping[int, Sequence[bytes]], rows: Rows, refused: frozenset[str]
    ) -> Place:
        fleet = self._fleet
        decoding, computing = fleet.by_role(fleet.fast(rows))
        hits = self._hits(decoding, names)
        if len(computing) and num_tokens - hits.max() >= PREFILL_TOKENS:
            rows, reason = computing, Reason.PREFILL
            hits = self._hits(rows, names)
            at = self._choose(rows, num_tokens, hits) if len(rows) > 1 else 0
        elif len(decoding) == 1:
            rows, at, reason = decoding, 0, Reason.ONLY_ENGINE
        else:
            rows, at = decoding, self._choose(decoding, num_tokens, hits)
            if not self.uses_prefixes:
                reason = Reason.POLICY
            elif hits[at]:
                reason = Reason.PREFIX
            else:
                reason = Reason.LOAD if hits.any() else Reason.NO_PREFIX
        row, hit, most_hit = int(rows[at]), int(hits[at]), int(hits.argmax())
        holder = fleet.names[int(rows[most_hit])] if hits[most_hit] > hit else ""
        stream = PlacedStream(key, row, fleet.reports[row].identity, num_tokens, names, self._now, refused=refused)
        self._put(stream, row, hit)
        return Place(fleet.names[row], reason, hit, holder)

    def _choose(self, rows: Rows, num_tokens: int, hits: NDArray[np.int64]) -> int:
        random = self._count * GOLDEN % 2**64 / 2**64
        self._count += 1
        return self._policy.choose(PlacementView(self._fleet, rows, num_tokens, hits, self._count - 1, random))

    def _no_engine(self, identity: str, excluded: Set[int | None]) -> Hold | RefuseRequest:
        rows = {*self._fleet.row_of.values()} - self._removed - excluded
        reports = (self._fleet.reports[row] for row in rows)
        serving = [report for report in reports if report.condition in MAY_SERVE]
        # One without an identity may have it, unless it is gone for too long; or others have refused the request
        unknown = [r for r in serving if not (r.identity or excluded or r.condition is Condition.GONE)]
        if not identity or unknown or any(report.identity == identity for report in serving):
            if serving:
                return Hold("no engine is ready; " + ", ".join(sorted({r.condition.value for r in serving})))
            return RefuseRequest("no engine takes requests")
        return RefuseRequest("no other engine has the model and the settings with which this request began")

    def _prefix_names(self, block_size: int) -> PrefixNames:
        if (found := self._prefixes.get(block_size)) is None:
            if len(self._prefixes) >= 8:  # engines that changed their block size have left these
                self._prefixes.clear()
            found = self._prefixes[block_size] = PrefixNames(block_size, self._max_blocks)
        return found

    def _hits(self, rows: Rows, names: Mapping[int, Sequence[bytes]]) -> NDArray[np.int64]:
        """Return the tokens that each engine is expected to hold, int64[rows]."""
        hits = np.zeros(len(self._fleet.names), np.int64)
        for size, prefixes in names.items():
            num_tokens = self._prefix_names(size).num_tokens
            for count, engines in self._index.holders(prefixes):
                hits[engines] = num_tokens(count)
        return hits.take(rows)

    def _put(self, stream: PlacedStream, row: int, hit: int, share: float = 0.0) -> None:
        """Count a stream as placed on an engine. `share`: of the engine's time for moved streams; 0.0: it is new."""
        fleet = self._fleet
        stream.row, stream.since = row, self._now
        self._streams[stream.key] = stream
        self._streams_of.setdefault(row, {})[stream.key] = stream
        seconds = max(stream.num_tokens - hit, 0) * fleet.token_seconds_of(row)
        fleet.waiting_seconds[row] += seconds
        fleet.streams[row] += 1
        if share:
            fleet.moving_until[row] = max(fleet.moving_until[row], self._now) + seconds / share
        if names := stream.names.get(fleet.reports[row].block_size):
            self._index.add(row, names)

    def _end(self, key: int) -> None:
        if (stream := self._streams.pop(key, None)) is not None:
            self._take_from(stream)

    def _take_from(self, stream: PlacedStream) -> None:
        row = stream.row
        del self._streams_of[row][stream.key]
        self._fleet.streams[row] = max(0.0, self._fleet.streams[row] - 1)
        self._drop(row)

    def _set_leaving(self, row: int, condition: Condition) -> None:
        if condition in MOVES_STREAMS:
            self._leaving[row] = Reason.DRAINING if condition is Condition.DRAINING else Reason.LOST
        else:
            self._leaving.pop(row, None)
        if condition is Condition.GONE:
            self._index.clear(row)

    def _drop(self, row: int) -> None:
        """Free the row of an engine that is removed and has no streams."""
        if row in self._removed and not self._streams_of.get(row):
            self._removed.discard(row)
            self._leaving.pop(row, None)
            self._streams_of.pop(row, None)
            self._fleet.remove(self._fleet.names[row])

    # -- moving --------------------------------------------------------------------------------------------------------

    def _move_from(self, row: int, reason: Reason, found: list[Move]) -> None:
        """Move streams of an engine, oldest first, while other engines take more."""
        source, full = self._fleet.names[row], set[str]()
        for stream in list(self._streams_of.get(row, {}).values()):
            if stream.identity in full or (reason is Reason.SLOW and self._now - stream.since < REST):
                continue
            targets = self._targets(stream, reason)
            if not len(targets):
                if not (stream.left or stream.refused):
                    full.add(stream.identity)
                continue
            if reason is Reason.SLOW:
                stream.left |= {source}
            self._take_from(stream)
            hits = self._hits(targets, stream.names)
            at = self._choose(targets, stream.num_tokens, hits) if len(targets) > 1 else 0
            self._put(stream, int(targets[at]), int(hits[at]), 1.0 if reason is Reason.LOST else SHARE)
            found.append(Move(stream.key, source, self._fleet.names[stream.row], reason))

    def _targets(self, stream: PlacedStream, reason: Reason) -> Rows:
        """Return the engines that may take a stream now: ready, with the model of its tokens, and not busy with the
        recomputation of others that moved."""
        fleet = self._fleet
        if not stream.identity:
            return np.zeros(0, np.int64)
        rows, excluded = fleet.candidates(stream.identity).rows, stream.refused
        most = LOST_SECONDS if reason is Reason.LOST else MOVED_SECONDS
        chosen = fleet.moving_until.take(rows) - self._now < most
        chosen &= rows != stream.row
        if reason is Reason.SLOW:
            seconds = fleet.output_seconds.take(rows)
            chosen &= seconds <= NO_LONGER_SLOW * fleet.typical_output_seconds(rows)
            excluded |= stream.left
        if excluded:
            chosen &= ~np.isin(rows, [fleet.row_of.get(name, -1) for name in excluded])
        return fleet.fast(fleet.by_role(rows[chosen])[0])
