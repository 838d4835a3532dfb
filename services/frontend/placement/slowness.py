"""Engines that are far slower than others, with hysteresis."""

import math

import numpy as np

from services.frontend.placement.fleet import EngineColumns, Rows

SLOW = 4.0
"""An engine is far slower if an output token takes more than this multiple of the median engine's time ..."""
SLOW_SECONDS = 5.0
"""... for so long."""
NO_LONGER_SLOW = 2.0
"""It is slow until its multiple is at most this. Only engines below it are targets of streams that leave a slow one."""


def reference(columns: EngineColumns, rows: Rows) -> float:
    """Return the median of the measured seconds per output token, the lower one of two; 0.0 if none is measured."""
    seconds = columns.output_seconds.take(rows)
    known = np.sort(seconds[seconds > 0])
    return float(known[(len(known) - 1) // 2]) if len(known) else 0.0


def mark_slow(columns: EngineColumns, now: float) -> None:
    """Update `EngineColumns.slow`. Ready engines of one identity are compared with one another.

    Args:
        now: monotonic seconds.
    """
    ready = columns.candidates("").rows.tolist()
    columns.slow.intersection_update(ready)
    for identity in {columns.reports[row].identity for row in ready} - {""}:
        rows = columns.candidates(identity).rows
        typical = reference(columns, rows)
        seconds = columns.output_seconds.take(rows)
        for row in rows[seconds > SLOW * typical].tolist():
            columns.slow_since[row] = min(columns.slow_since[row], now)
            if now - columns.slow_since[row] >= SLOW_SECONDS:
                columns.slow.add(row)
        columns.slow_since[rows[seconds <= SLOW * typical]] = math.inf
        columns.slow.difference_update(rows[seconds <= NO_LONGER_SLOW * typical].tolist())
