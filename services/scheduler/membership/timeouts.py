"""Time limits for a worker's silence, loading and return."""

from collections.abc import Collection

from services.scheduler.membership.member import Member
from services.scheduler.membership.member_states import MemberState

LOAD_SILENCE = 30.0
"""Seconds of silence that are excused at least while a worker does not serve: imports and compilation can hold up even
its heartbeat thread."""
RETURN_TIMEOUT = 15.0
"""Seconds until a worker whose epoch has ended must have registered again."""
ASSIGN_TIMEOUT = 15.0
"""Seconds until a worker's heartbeats must carry its assigned epoch. One whose heartbeats do not is hung."""
WAITING = (MemberState.LOADED, MemberState.READY)
"""States of a rank that waits for the other ranks of a forming epoch. It measures no work."""
LOAD_STALL = 1800.0
"""Seconds within which at least one rank of a forming epoch must make progress: a rank may hang although its heartbeat
thread runs."""


def overdue(member: Member, now: float, heartbeat_timeout: float, sign: int) -> str | None:
    """Return why the worker is given up, or None.

    Args:
        heartbeat_timeout: seconds, for a worker that serves.
        sign: number of the last sign of life that ranks must answer; 0: none.
    """
    if member.state is MemberState.RETURNING:
        late = now - member.since > RETURN_TIMEOUT
        return "did not register again after its epoch ended" if late else None
    silence = now - member.last_seen
    serves = member.state is MemberState.READY
    if silence > (heartbeat_timeout if serves else max(heartbeat_timeout, LOAD_SILENCE)):
        return f"was silent for {silence:.1f} s"
    if serves and (seconds := member.answers.seconds_without(sign)) > heartbeat_timeout:
        return f"has not answered the scheduler for {seconds:.0f} s"
    if member.state is MemberState.ASSIGNED and member.last_seen - member.since > ASSIGN_TIMEOUT:
        return f"is alive, but did not take up rank {member.rank}"
    return None


def stalled(ranks: Collection[Member], now: float, idle_timeout: float) -> str | None:
    """Return why a forming epoch is given up, or None.

    Args:
        idle_timeout: seconds within which at least one rank must report progress or use processor time.
    """
    since = max(member.since for member in ranks)
    if now - since > LOAD_STALL:
        return f"no rank made progress for {LOAD_STALL:.0f} s"
    idle = [since if member.state in WAITING else member.idle.since for member in ranks]
    measured = [began for began in idle if began is not None]
    if len(measured) == len(ranks) and now - max(since, *measured) > idle_timeout:
        return f"no rank did any work for {idle_timeout:g} s (--load-timeout-seconds)"
    return None
