"""Conditions of an engine, as one frontend sees it: the rules first, then the table.

    CONNECTING  no connection yet, or its workers are not ready: it starts, loads or recovers
    READY       executes requests
    DRAINING    ends on purpose: it still executes what it has
    SILENT      has given no sign of life for longer than a live one (doubt, docs/invariants.md)
    GONE        lost: its connection broke, or it was silent for too long

    CONNECTING ──SERVE──► READY ──PAUSE──► CONNECTING
    READY, CONNECTING ──SILENCE──► SILENT ──SERVE──► READY, ──PAUSE──► CONNECTING
    any but GONE ──DRAIN──► DRAINING ──RESUME──► CONNECTING
    any ──LOSE──► GONE ──CONNECT──► CONNECTING

Rules:

1. New requests go to READY engines only.
2. Streams of DRAINING and GONE engines move. Those of a SILENT engine stay until it is lost; it may only be late.
3. A DRAINING engine stays so whatever it sends, until it is lost or resumed.
4. If the table has no row for an event, that is a bug: `IllegalCondition`.
"""

import enum


class IllegalCondition(Exception):
    """A change of condition that is not in the table: a bug in the frontend, never the engine's fault."""


class Condition(enum.StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    SILENT = "silent"
    GONE = "gone"


class ConditionEvent(enum.Enum):
    CONNECT = enum.auto()
    """A connection to it is made, again."""
    SERVE = enum.auto()
    """It has sent that it executes requests."""
    PAUSE = enum.auto()
    """It has sent that it does not: its workers load, or were lost."""
    SILENCE = enum.auto()
    """It has given no sign of life for longer than a live one does (doubt, docs/invariants.md)."""
    DRAIN = enum.auto()
    """It was sent to stop, or says that it stops."""
    RESUME = enum.auto()
    """The drain was cancelled."""
    LOSE = enum.auto()
    """The connection is lost, or it was silent for too long."""


MOVES_STREAMS = (Condition.DRAINING, Condition.GONE)
MAY_SERVE = (Condition.CONNECTING, Condition.SILENT, Condition.GONE)
"""Conditions of an engine that may become READY without a change by an administrator."""

_C, _E = Condition, ConditionEvent

CONDITIONS: dict[tuple[Condition, ConditionEvent], Condition] = {
    (_C.CONNECTING, _E.CONNECT): _C.CONNECTING,
    (_C.GONE, _E.CONNECT): _C.CONNECTING,
    **{(condition, _E.SERVE): _C.READY for condition in (_C.CONNECTING, _C.READY, _C.SILENT)},
    **{(condition, _E.PAUSE): _C.CONNECTING for condition in (_C.CONNECTING, _C.READY, _C.SILENT)},
    **{(condition, _E.SILENCE): _C.SILENT for condition in (_C.CONNECTING, _C.READY, _C.SILENT)},
    **{(condition, _E.DRAIN): _C.DRAINING for condition in _C if condition is not _C.GONE},
    **{(_C.DRAINING, event): _C.DRAINING for event in (_E.SERVE, _E.PAUSE, _E.SILENCE)},
    (_C.DRAINING, _E.RESUME): _C.CONNECTING,
    **{(condition, _E.LOSE): _C.GONE for condition in _C},
}
"""(condition, event) -> next condition."""


def condition_after(condition: Condition, event: ConditionEvent) -> Condition:
    """Return the next condition. Raises: IllegalCondition"""
    after = CONDITIONS.get((condition, event))
    if after is None:
        raise IllegalCondition(f"{event.name} has no place while an engine is {condition.name}")
    return after
