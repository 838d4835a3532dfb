"""States of one worker, as the scheduler sees it: the rules first, then the table.

A worker registers and is a spare until an epoch takes it as a rank. When the epoch ends, the worker registers again on
the same connection. A peer that is not registered is UNKNOWN: it never registered, or it was lost.

    UNKNOWN       not registered, or lost
    SPARE         registered, belongs to no epoch
    ASSIGNED      has been sent its assignment, has not confirmed it yet
    LOADING       has confirmed its assignment, reads its weights
    LOADED        has its weights, waits until all ranks have theirs, so that all get the same cache size
    INITIALIZING  allocates the cache and runs the canary step with the other ranks
    READY         executes steps
    RETURNING     its epoch has ended, it has not registered again yet

    UNKNOWN ──REGISTER──► SPARE ──ASSIGN──► ASSIGNED ──HEARTBEAT, PROGRESS──► LOADING ──LOADED──► LOADED
                            ▲                                                                       │
                            │ REGISTER                                                   INITIALIZE │
                            │                                                                       ▼
                        RETURNING ◄────────────END, from all ranks──────────── READY ◄──READY── INITIALIZING

    any state ──LOST, GIVE_UP, LOAD_FAILED──► UNKNOWN

Rules:

1. A message that names another epoch than the current one proves that the worker is alive, and nothing else. It is no
   event.
2. If the table has no row for a message, the worker is at fault: `ProtocolError`. If it has none for an event of the
   scheduler, that is a bug: `IllegalTransition`. Neither changes anything.
3. A worker sends messages of its old epoch until it has read `EndEpoch`. RETURNING and UNKNOWN have rows for all of
   them, which drop them.
4. A worker has two connections, and messages on one may overtake messages on the other. Heartbeats and `RankLost` of
   the old epoch may arrive after `Register`; SPARE drops them.
5. A rank that leaves the epoch in any other way than by `END` breaks it: the epoch ends for all ranks.
"""

import enum

from protocol.membership import Heartbeat, Loaded, LoadFailed, LoadProgress, RankLost, Ready, Register, WorkerMessage
from protocol.steps import StepFault


class MemberState(enum.Enum):
    UNKNOWN = enum.auto()
    SPARE = enum.auto()
    ASSIGNED = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    INITIALIZING = enum.auto()
    READY = enum.auto()
    RETURNING = enum.auto()


class MemberEvent(enum.Enum):
    # messages of the worker
    REGISTER = enum.auto()
    HEARTBEAT = enum.auto()
    PROGRESS = enum.auto()
    LOADED = enum.auto()
    READY = enum.auto()
    RANK_LOST = enum.auto()
    """Another rank is gone; this worker is well."""
    LOAD_FAILED = enum.auto()
    """It cannot serve, and exits."""
    LOST = enum.auto()
    """It failed in a step, its connection broke, or it registered as something that does not fit."""
    # decisions of the scheduler
    GIVE_UP = enum.auto()
    """It was silent for too long, or did not do what it was sent in time. It may still be alive."""
    ASSIGN = enum.auto()
    INITIALIZE = enum.auto()
    END = enum.auto()


class MemberAction(enum.Enum):
    JOIN = enum.auto()
    """A worker was added to the group."""
    LEAVE = enum.auto()
    """A worker was removed from the group."""
    BREAK = enum.auto()
    """The epoch has lost a rank."""
    DISMISS = enum.auto()
    """Send `EndEpoch` to the worker, so that it registers again if it is alive."""
    ADVANCE = enum.auto()
    """Check whether all ranks have reached the state of this one."""
    SHOW = enum.auto()
    """Show the progress of loading."""
    BLAME = enum.auto()
    """Show the error as the reason why there is no group."""


IN_EPOCH = (MemberState.ASSIGNED, MemberState.LOADING, MemberState.LOADED, MemberState.INITIALIZING, MemberState.READY)
"""The states of a rank."""

_S, _E, _A = MemberState, MemberEvent, MemberAction

MEMBER_TABLE: dict[tuple[MemberState, MemberEvent], tuple[MemberState, tuple[MemberAction, ...]]] = {
    # registration
    (_S.UNKNOWN, _E.REGISTER): (_S.SPARE, (_A.JOIN,)),
    (_S.RETURNING, _E.REGISTER): (_S.SPARE, ()),
    (_S.SPARE, _E.REGISTER): (_S.SPARE, ()),
    **{(state, _E.REGISTER): (_S.SPARE, (_A.BREAK,)) for state in IN_EPOCH},
    # from the assignment to the first step
    (_S.SPARE, _E.ASSIGN): (_S.ASSIGNED, ()),
    (_S.ASSIGNED, _E.HEARTBEAT): (_S.LOADING, ()),
    (_S.ASSIGNED, _E.PROGRESS): (_S.LOADING, (_A.SHOW,)),
    (_S.ASSIGNED, _E.LOADED): (_S.LOADED, (_A.ADVANCE,)),
    (_S.LOADING, _E.PROGRESS): (_S.LOADING, (_A.SHOW,)),
    (_S.LOADING, _E.LOADED): (_S.LOADED, (_A.ADVANCE,)),
    (_S.LOADED, _E.INITIALIZE): (_S.INITIALIZING, ()),
    (_S.INITIALIZING, _E.READY): (_S.READY, (_A.ADVANCE,)),
    **{(state, _E.HEARTBEAT): (state, ()) for state in (_S.LOADING, _S.LOADED, _S.INITIALIZING, _S.READY)},
    # the end of the epoch
    **{(state, _E.END): (_S.RETURNING, ()) for state in IN_EPOCH},
    **{(state, _E.RANK_LOST): (state, (_A.BREAK,)) for state in IN_EPOCH},
    # the loss of the worker
    **{(state, event): (_S.UNKNOWN, (_A.LEAVE, _A.BREAK)) for state in IN_EPOCH for event in (_E.LOST, _E.LOAD_FAILED)},
    **{(state, _E.GIVE_UP): (_S.UNKNOWN, (_A.LEAVE, _A.BREAK, _A.DISMISS)) for state in IN_EPOCH},
    **{(state, _E.LOST): (_S.UNKNOWN, (_A.LEAVE,)) for state in (_S.SPARE, _S.RETURNING)},
    **{(state, _E.LOAD_FAILED): (_S.UNKNOWN, (_A.LEAVE,)) for state in (_S.SPARE, _S.RETURNING)},
    (_S.SPARE, _E.GIVE_UP): (_S.UNKNOWN, (_A.LEAVE, _A.DISMISS)),
    (_S.RETURNING, _E.GIVE_UP): (_S.UNKNOWN, (_A.LEAVE,)),
    (_S.UNKNOWN, _E.LOAD_FAILED): (_S.UNKNOWN, (_A.BLAME,)),
    # dropped: messages of the epoch that has ended
    (_S.SPARE, _E.HEARTBEAT): (_S.SPARE, ()),
    (_S.SPARE, _E.RANK_LOST): (_S.SPARE, ()),
    **{
        (state, event): (state, ())
        for state in (_S.RETURNING, _S.UNKNOWN)
        for event in (_E.HEARTBEAT, _E.PROGRESS, _E.LOADED, _E.READY, _E.RANK_LOST)
    },
    (_S.UNKNOWN, _E.LOST): (_S.UNKNOWN, ()),
}
"""(state, event) -> (next state, actions in order)."""

MESSAGES: dict[type, MemberEvent] = {
    Register: _E.REGISTER,
    Heartbeat: _E.HEARTBEAT,
    LoadProgress: _E.PROGRESS,
    Loaded: _E.LOADED,
    Ready: _E.READY,
    RankLost: _E.RANK_LOST,
    LoadFailed: _E.LOAD_FAILED,
    StepFault: _E.LOST,
}
"""Message -> its event."""


def event_of(message: WorkerMessage | StepFault, epoch: int) -> MemberEvent | None:
    """Return the event of a message; None if the message names another epoch: it proves only that the
    worker is alive.
    """
    if isinstance(message, Heartbeat | Loaded | Ready | RankLost | StepFault) and message.epoch != epoch:
        return None
    if isinstance(message, LoadProgress) and message.epoch not in (0, epoch):
        return None
    return MESSAGES[type(message)]


def reason_of(message: WorkerMessage | StepFault) -> str:
    """Return what happened to the worker, to follow its name; "" for a message that reports no fault."""
    match message:
        case Register():
            return "registered again"
        case LoadFailed(error=error):
            return f"cannot serve: {error}"
        case RankLost(error=error, out_of_memory=True):
            return f"is well: {error}"
        case RankLost(error=error):
            return f"lost another rank: {error}"
        case StepFault(step_id=step_id, error=error):
            return f"failed in step {step_id}: {error}"
        case _:
            return ""
