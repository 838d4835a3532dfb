"""Columns of the engines that a frontend knows, by row, and which of them are far slower than others."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.frontend.placement.decisions import Condition, EngineReport, Role

Rows = NDArray[np.int64]
Column = NDArray[np.float64]

NUM_COLUMNS = 6
TYPICAL_TOKEN_SECONDS = 1e-4
"""Assumed time of a prompt token while no engine has measured one."""
SLOW = 4.0
"""An engine is far slower if an output token takes more than this multiple of the median engine's time ..."""
SLOW_SECONDS = 5.0
"""... for so long."""
NO_LONGER_SLOW = 2.0
"""It is slow until its multiple is at most this. Only engines below it are targets of streams that leave a slow one."""


class Candidates(NamedTuple):
    rows: Rows
    block_sizes: tuple[int, ...]
    """Different known ones."""


class EngineColumns:
    """Rows are reused: that of an engine that is removed belongs to the next new one."""

    def __init__(self) -> None:
        self.row_of: dict[str, int] = {}
        self.names: list[str] = []
        self.reports: list[EngineReport] = []
        self._free: list[int] = []
        self._has_roles = False
        """True: an engine has reported that it only computes prompts."""
        self._candidates: dict[tuple[str, Condition], Candidates] = {}
        """By required identity and condition, until a condition, an identity or a block size changes."""
        self.slow: set[int] = set()
        """Rows of engines that have been far slower than others for some time."""
        self._set(np.zeros((NUM_COLUMNS, 0)))

    def _set(self, columns: NDArray[np.float64]) -> None:
        self._columns = columns
        self.waiting_seconds = columns[0]
        """Expected queue as reported, and the computation that was placed since then."""
        self.streams = columns[1]
        """Open requests as reported, and those placed since then."""
        self.prompt_seconds = columns[2]
        """Seconds per prompt token; 0.0: unknown."""
        self.output_seconds = columns[3]
        """Seconds per output token; 0.0: unknown."""
        self.moving_until = columns[4]
        """When the streams that moved here are recomputed, at the pace of moves; monotonic seconds."""
        self.slow_since = columns[5]
        """When it was first found far slower than others; inf: it is not. Monotonic seconds."""

    def report(self, name: str, report: EngineReport) -> int:
        """Set the columns of an engine. Return its row if its condition has changed, else -1."""
        if (row := self.row_of.get(name, -1)) < 0:
            changed = row = self._add(name, report)
        else:
            before, self.reports[row] = self.reports[row], report
            changed = -1 if before.condition is report.condition else row
            if changed >= 0 or before.identity != report.identity or before.block_size != report.block_size:
                self._candidates.clear()
        self._has_roles |= report.role is Role.PREFILL
        self.waiting_seconds[row] = report.queue_seconds
        self.streams[row] = report.num_streams
        self.prompt_seconds[row] = report.seconds_per_prompt_token
        # An engine that computes prompts sends few tokens, and is not slow for that
        decodes = report.role is not Role.PREFILL
        self.output_seconds[row] = report.seconds_per_output_token if decodes else 0.0
        return changed

    def remove(self, name: str) -> None:
        row = self.row_of.pop(name)
        self.reports[row] = EngineReport(Condition.GONE)
        self._free.append(row)
        self._candidates.clear()

    def candidates(self, identity: str, condition: Condition = Condition.READY) -> Candidates:
        """Return the engines in a condition, with this identity if it is not empty."""
        if (found := self._candidates.get((identity, condition))) is None:
            rows = [
                row
                for row in self.row_of.values()
                if self.reports[row].condition is condition and (not identity or self.reports[row].identity == identity)
            ]
            sizes = {self.reports[row].block_size for row in rows} - {0}
            found = Candidates(np.array(sorted(rows), np.int64), tuple(sorted(sizes)))
            self._candidates[identity, condition] = found
        return found

    def typical_output_seconds(self, rows: Rows) -> float:
        """Return the median of the measured seconds per output token, the lower one of two; 0.0 if none is measured."""
        seconds = self.output_seconds.take(rows)
        known = np.sort(seconds[seconds > 0])
        return float(known[(len(known) - 1) // 2]) if len(known) else 0.0

    def mark_slow(self, now: float) -> None:
        """Update `slow`. Ready engines of one identity are compared with one another. `now`: monotonic seconds."""
        ready = self.candidates("").rows.tolist()
        self.slow.intersection_update(ready)
        for identity in {self.reports[row].identity for row in ready} - {""}:
            rows = self.candidates(identity).rows
            typical, seconds = self.typical_output_seconds(rows), self.output_seconds.take(rows)
            for row in rows[seconds > SLOW * typical].tolist():
                self.slow_since[row] = min(self.slow_since[row], now)
                if now - self.slow_since[row] >= SLOW_SECONDS:
                    self.slow.add(row)
            self.slow_since[rows[seconds <= SLOW * typical]] = math.inf
            self.slow.difference_update(rows[seconds <= NO_LONGER_SLOW * typical].tolist())

    def fast(self, rows: Rows) -> Rows:
        """Return the engines that are not far slower than others; all, if there are none."""
        fast = rows[~np.isin(rows, list(self.slow))] if self.slow else rows
        return fast if len(fast) else rows

    def by_role(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the engines that decode, and those that only compute prompts for them. While there are none of one
        kind, all are of the first."""
        if not self._has_roles:
            return rows, rows[:0]
        prefills = np.array([self.reports[row].role is Role.PREFILL for row in rows], np.bool_)
        if prefills.all():
            return rows, rows[:0]
        return rows[~prefills], rows[prefills]

    def token_seconds(self, rows: Rows) -> Column:
        """Return the seconds per prompt token. Those not measured are assumed to be as the mean of the others."""
        seconds = self.prompt_seconds.take(rows)
        if len(seconds) and not seconds[seconds.argmin()]:
            known = seconds > 0
            seconds[~known] = seconds[known].mean() if known.any() else TYPICAL_TOKEN_SECONDS
        return seconds

    def token_seconds_of(self, row: int) -> float:
        if known := float(self.prompt_seconds[row]):
            return known
        return float(self.token_seconds(np.append(self.candidates("").rows, row)).mean())

    def _add(self, name: str, report: EngineReport) -> int:
        if not self._free:
            self._free.append(len(self.names))
            self.names.append(name)
            self.reports.append(report)
            self._set(np.append(self._columns, np.zeros((NUM_COLUMNS, 1)), axis=1))
        row = self._free.pop()
        self.row_of[name], self.names[row], self.reports[row] = row, name, report
        self.moving_until[row], self.slow_since[row] = 0.0, math.inf
        self.slow.discard(row)
        self._candidates.clear()
        return row
