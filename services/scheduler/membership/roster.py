"""The registered workers, each in a state of `member_states`."""

from collections.abc import Iterator

from protocol.codec import ProtocolError
from protocol.fields import MAX_TEXT
from protocol.membership import Heartbeat, Loaded, LoadProgress, Register, WorkerMessage
from protocol.steps import StepFault
from services.scheduler.membership.member import Member
from services.scheduler.membership.member_states import MEMBER_TABLE, MemberAction, MemberEvent, MemberState, event_of
from services.scheduler.transitions import transition

MAX_REASON = MAX_TEXT // 2
"""Characters of a worker's error. The messages that repeat it put some words before it, within `MAX_TEXT`."""


class Roster:
    """A peer that is not in it is UNKNOWN."""

    def __init__(self) -> None:
        self._members: dict[bytes, Member] = {}
        self.last_was_stopped = False
        """A signal has stopped the last worker that left, or one that had not registered."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        """In the order of registration; the roster may change meanwhile."""
        return iter(list(self._members.values()))

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._members

    def __getitem__(self, peer: bytes) -> Member:
        return self._members[peer]

    def state_of(self, peer: bytes) -> MemberState:
        member = self._members.get(peer)
        return MemberState.UNKNOWN if member is None else member.state

    def named(self, peer: bytes, text: str) -> str:
        """Return `text`, cut to `MAX_REASON` characters, after the name of the worker."""
        member, text = self._members.get(peer), text[:MAX_REASON]
        return f"a worker {text}" if member is None else f"worker {member.name} {text}"

    @property
    def spares(self) -> list[Member]:
        return [member for member in self if member.state is MemberState.SPARE]

    @property
    def ranks(self) -> list[Member]:
        """The workers of the current epoch, in the order of their ranks."""
        return sorted((member for member in self if member.in_epoch), key=lambda member: member.rank)

    @property
    def num_loads(self) -> int:
        """Number of times that the present workers' processes have read weights."""
        return sum(member.loaded.num_loads for member in self if member.loaded is not None)

    def add(self, peer: bytes, register: Register, now: float) -> None:
        """Store what a worker registered, with the state that it had before. `apply` of REGISTER is to follow."""
        self._members[peer] = Member(peer, register, self.state_of(peer), now, now)

    def receive(self, peer: bytes, message: WorkerMessage | StepFault, epoch: int, now: float) -> MemberEvent | None:
        """Store the content of a message, and return its event, or None if it does not belong to `epoch`.

        Raises: ProtocolError, with nothing changed, for a message that the worker may not send in its state
        """
        event, state = event_of(message, epoch), self.state_of(peer)
        if event is not None and (state, event) not in MEMBER_TABLE:
            worker = self.named(peer, f"is {state.name}")
            raise ProtocolError(f"{type(message).__name__} has no place while {worker}")
        member = self._members.get(peer)
        if member is None:
            self.last_was_stopped |= isinstance(message, Heartbeat) and message.is_stopped
        else:
            member.last_seen = now
            if isinstance(message, Heartbeat):
                member.answers.results = message.answers
                if message.is_stopped and member.stopped_at is None:
                    member.stopped_at = now
            match message:
                case LoadProgress():
                    member.progress = message
                case Loaded() if event is not None:
                    member.loaded = message
                case Heartbeat() if event is not None:
                    member.last_step = message.last_step_id
                    member.idle.observe(message.work, now)
        return event

    def apply(self, peer: bytes, event: MemberEvent, now: float) -> tuple[MemberAction, ...]:
        """Move a worker by the table, and return the actions of the row.

        Raises: IllegalTransition, with nothing changed
        """
        member, before = self._members.get(peer), self.state_of(peer)
        after, actions = transition(MEMBER_TABLE, before, event, "a worker")
        if member is not None and after is not before:
            member.state, member.since = after, now
        if member is not None and after is MemberState.UNKNOWN:
            del self._members[peer]
            self.last_was_stopped = member.stopped_at is not None
        return actions
