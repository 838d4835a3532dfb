"""One registered worker."""

from dataclasses import dataclass

from protocol.membership import Loaded, LoadProgress, Register
from services.scheduler.membership.member_states import IN_EPOCH, MemberState

WORK = 0.1
"""Seconds of processor time that count as work; heartbeats alone use less within minutes."""


@dataclass
class Member:
    peer: bytes
    register: Register
    state: MemberState
    since: float
    """When it entered its state, or last made progress in it."""
    last_seen: float
    """When its last message arrived."""
    work: float = 0.0
    """`Heartbeat.work` when it was last seen to work."""
    worked_at: float = 0.0
    """When it was last seen to work, or measured for the first time; 0.0: it was not measured in this state."""
    rank: int = -1
    progress: LoadProgress | None = None
    loaded: Loaded | None = None
    """Sizes of what it has loaded for the current epoch."""
    last_step: int = 0
    """The last step of the current epoch that it has finished, by its heartbeats."""

    @property
    def name(self) -> str:
        """For logs and errors."""
        return f"{self.register.hostname or 'worker'}:{self.register.pid}"

    @property
    def in_epoch(self) -> bool:
        """Return whether it is a rank of the current epoch."""
        return self.state in IN_EPOCH

    def on_work(self, work: float, now: float) -> None:
        """A heartbeat has arrived. `work`: its processor time."""
        if not work:
            self.worked_at = 0.0
        elif not self.worked_at or not 0 <= work - self.work < WORK:
            self.work, self.worked_at = work, now
