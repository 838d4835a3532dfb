"""One registered worker."""

from dataclasses import dataclass, field

from protocol.membership import Loaded, LoadProgress, Register
from services.process import IdleWatch
from services.scheduler.membership.answers import Answers
from services.scheduler.membership.member_states import IN_EPOCH, MemberState


@dataclass
class Member:
    peer: bytes
    register: Register
    state: MemberState
    since: float
    """When it entered its state, or last made progress in it."""
    last_seen: float
    """When its last message arrived."""
    idle: IdleWatch = field(default_factory=IdleWatch)
    """Observes `Heartbeat.work`, which is measured while the worker loads."""
    rank: int = -1
    progress: LoadProgress | None = None
    loaded: Loaded | None = None
    """Sizes of what it has loaded for the current epoch."""
    last_step: int = 0
    """The last step of the current epoch that it has finished, by its heartbeats."""
    answers: Answers = field(default_factory=Answers)

    @property
    def name(self) -> str:
        """For logs and errors."""
        return f"{self.register.hostname or 'worker'}:{self.register.pid}"

    @property
    def in_epoch(self) -> bool:
        """Return whether it is a rank of the current epoch."""
        return self.state in IN_EPOCH
