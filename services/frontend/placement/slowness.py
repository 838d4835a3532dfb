"""Engines that are far slower than others, with hysteresis."""

import math

import numpy as np

from services.frontend.placement.fleet import Fleet, Rows

SLOW = 4.0
"""An engine is far slower if an output token takes more than this multiple of the median engine's time ..."""
SLOW_SECONDS = 5.0
"""... for so long."""
NO_LONGER_SLOW = 2.0
"""It is slow until its multiple is at most this. Only engines below it are targets of streams that leave a slow one."""


def reference(fleet: Fleet, rows: Rows) -> float:
    """Return the median of the measured seconds per output token, the lower one of two; 0.0 if none is measured."""
    seconds = fleet.output_seconds.take(rows)
    known = np.sort(seconds[seconds > 0])
    return float(known[(len(known) - 1) // 2]) if len(known) else 0.0


def mark_slow(fleet: Fleet, rows: Rows, now: float) -> None:
    """Update `Fleet.slow`.

    Args:
        rows: engines that are ready; they are compared with one another.
        now: monotonic seconds.
    """
    typical = reference(fleet, rows)
    seconds = fleet.output_seconds.take(rows)
    for row in rows[seconds > SLOW * typical].tolist():
        fleet.slow_since[row] = min(fleet.slow_since[row], now)
        if now - fleet.slow_since[row] >= SLOW_SECONDS:
            fleet.slow.add(row)
    fleet.slow_since[rows[seconds <= SLOW * typical]] = math.inf
    fleet.slow.difference_update(rows[seconds <= NO_LONGER_SLOW * typical].tolist())
    fleet.slow.intersection_update(rows.tolist())
