"""States of the worker group, which are phases of the engine: the rules first, then the table.

An epoch is one life of the group, from the assignment of ranks until one of them is lost or another size fits better.
There is at most one epoch at a time. It is in effect, and steps are dispatched, in READY only.

    WAITING_FOR_WORKERS    no epoch: workers are missing, or the next one is about to begin
    LOADING                an epoch has begun: its ranks load, connect to one another and run the canary step
    READY                  the epoch is in effect
    FAILED                 terminal: the group cannot serve, every open request has ended with an error

    WAITING_FOR_WORKERS ──FORM──► LOADING ──READY──► READY
             ▲                       │                 │
             └─────BREAK, RESIZE─────┴──BREAK, RESIZE──┘         any state ──FAIL──► FAILED

Rules:

1. When an epoch ends, each rank is sent `EndEpoch` on all of its connections and must register again. What was in
   flight in an epoch that was in effect is void (the epoch void, docs/invariants.md).
2. An epoch ends by a fault (BREAK), or because another size fits the workers better or a signal has stopped a rank
   (RESIZE). Faults are counted: after `MAX_FUTILE_EPOCHS` in a row that brought nothing, the group fails.
3. From the end of an epoch that was in effect to the next one that is, the group *recovers*: open requests wait for it,
   and frontends are sent RECOVERING in place of the state. When that takes longer than the recovery timeout, they end
   with an error; the group goes on without them.
4. If the table has no row for an event, that is a bug: `IllegalTransition`, and nothing changes. A failed group takes
   no events.
"""

import enum

from protocol.requests import EnginePhase


class GroupEvent(enum.Enum):
    FORM = enum.auto()
    """Enough workers are spare for an epoch."""
    LOADED = enum.auto()
    """All ranks have loaded their weights."""
    READY = enum.auto()
    """All ranks have run the canary step."""
    BREAK = enum.auto()
    """A rank is lost, or none comes further."""
    RESIZE = enum.auto()
    """`--tensor-parallel-size auto`: another size fits the workers better. Or a rank that was stopped leaves."""
    FAIL = enum.auto()
    """The group cannot serve with this configuration, or no epoch lasts."""


class GroupAction(enum.Enum):
    ASSIGN = enum.auto()
    """Begin an epoch: send each rank its assignment."""
    INITIALIZE = enum.auto()
    """Send each rank the size of its cache."""
    START = enum.auto()
    """Put the epoch in effect."""
    END = enum.auto()
    """Send each rank the end of the epoch."""
    VOID = enum.auto()
    """The epoch was in effect: make its steps void and begin to recover."""
    COUNT = enum.auto()
    """Count the fault."""
    END_REQUESTS = enum.auto()
    """End open requests with an error: the group does not recover."""
    SHUT_DOWN = enum.auto()
    """Send all workers away."""


_S, _E, _A = EnginePhase, GroupEvent, GroupAction

GROUP_TABLE: dict[tuple[EnginePhase, GroupEvent], tuple[EnginePhase, tuple[GroupAction, ...]]] = {
    # an epoch begins
    (_S.WAITING_FOR_WORKERS, _E.FORM): (_S.LOADING, (_A.ASSIGN,)),
    (_S.LOADING, _E.LOADED): (_S.LOADING, (_A.INITIALIZE,)),
    (_S.LOADING, _E.READY): (_S.READY, (_A.START,)),
    # an epoch ends
    (_S.LOADING, _E.BREAK): (_S.WAITING_FOR_WORKERS, (_A.END, _A.COUNT)),
    (_S.LOADING, _E.RESIZE): (_S.WAITING_FOR_WORKERS, (_A.END,)),
    (_S.READY, _E.BREAK): (_S.WAITING_FOR_WORKERS, (_A.END, _A.VOID, _A.COUNT)),
    (_S.READY, _E.RESIZE): (_S.WAITING_FOR_WORKERS, (_A.END, _A.VOID)),
    # the group cannot serve
    (_S.WAITING_FOR_WORKERS, _E.FAIL): (_S.FAILED, (_A.END_REQUESTS, _A.SHUT_DOWN)),
    (_S.LOADING, _E.FAIL): (_S.FAILED, (_A.END_REQUESTS, _A.SHUT_DOWN)),
    (_S.READY, _E.FAIL): (_S.FAILED, (_A.VOID, _A.END_REQUESTS, _A.SHUT_DOWN)),
}
"""(state, event) -> (next state, actions in order)."""
