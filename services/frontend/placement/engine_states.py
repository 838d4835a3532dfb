"""Conditions of an engine, as one frontend sees it. `Availability.condition` says which of them holds.

Rules:

1. New requests go to READY engines only.
2. Streams of DRAINING, RECOVERING and GONE engines move. Those of a SILENT engine stay until it is lost; it may only
   be late.
"""

import enum


class Condition(enum.StrEnum):
    CONNECTING = "connecting"
    """No connection yet, or its workers are not ready: it starts, loads or recovers."""
    READY = "ready"
    """It executes requests."""
    DRAINING = "draining"
    """It ends on purpose: it still executes what it has."""
    SILENT = "silent"
    """It has given no sign of life for longer than a live one (doubt, docs/invariants.md)."""
    RECOVERING = "recovering"
    """Its workers are lost, and were not back in time; its scheduler lives."""
    GONE = "gone"
    """Lost: its connection broke, or it was silent for too long."""


MOVES_STREAMS = (Condition.DRAINING, Condition.RECOVERING, Condition.GONE)
MAY_SERVE = (Condition.CONNECTING, Condition.SILENT, Condition.RECOVERING, Condition.GONE)
"""Conditions of an engine that may become READY without a change by an administrator."""
