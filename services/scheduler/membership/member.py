"""One registered worker."""

from dataclasses import dataclass, field

from protocol.membership import Loaded, LoadProgress, Register
from protocol.silence import unanswered
from services.process import IdleWatch
from services.scheduler.membership.member_states import IN_EPOCH, MemberState


@dataclass
class Answers:
    """The scheduler's signs of life that a rank has answered, on each of its connections, by their numbers; each worker
    gets the same ones.

    A heartbeat answers on the connection for results, a `Pong` on the one for plans. A rank reads plans between two
    steps only. So while a step is in flight, its time limit takes the place of the answer.
    """

    start: int = 0
    """Last sign before the epoch took effect."""
    results: int = 0
    """Last sign that was answered by a heartbeat."""
    plans: int = 0
    """Last sign that was answered by a `Pong`, or sent while a step was in flight."""

    def seconds_without(self, sent: int) -> float:
        """Return the seconds that a sign has waited for its answer on one of the connections, at least.

        Args:
            sent: the last sign that was sent.
        """
        return unanswered(sent, max(self.start, min(self.results, self.plans)))


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
    stopped_at: float | None = None
    """When its heartbeats first said that a signal has stopped it."""

    @property
    def name(self) -> str:
        """For logs and errors."""
        return f"{self.register.hostname or 'worker'}:{self.register.pid}"

    @property
    def in_epoch(self) -> bool:
        """Return whether it is a rank of the current epoch."""
        return self.state in IN_EPOCH
