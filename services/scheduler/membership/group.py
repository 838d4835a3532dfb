"""The worker group: a state machine without I/O or clock. Events go in, actions come out.

Each worker follows the table of `member_states`, the group that of `group_states`. The actions of a worker's row may
cause an event of the group, and the actions of the group's row go to workers and service. After each event an epoch is
formed if there is none and enough workers are spare.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

from protocol.epochs import number_of
from protocol.membership import EndEpoch, Loaded, RankLost, Register, Shutdown, WorkerMessage
from protocol.requests import EnginePhase
from protocol.steps import StepFault
from services.config import SchedulerConfig
from services.scheduler.membership.actions import Action, Ended, FailRequests, News, Refuse, Send
from services.scheduler.membership.admission import objection
from services.scheduler.membership.contents import MAX_PARTS, WeightContents
from services.scheduler.membership.epoch import Epoch
from services.scheduler.membership.formation import Formation, GroupSize
from services.scheduler.membership.group_states import GROUP_TABLE, GroupAction, GroupEvent
from services.scheduler.membership.losses import Losses
from services.scheduler.membership.member import Member
from services.scheduler.membership.member_states import MemberAction, MemberEvent, MemberState, reason_of
from services.scheduler.membership.roster import Roster
from services.scheduler.membership.sizes import GroupError
from services.scheduler.membership.step_watch import SMALLEST, StepSize, StepWatch
from services.scheduler.membership.timeouts import overdue, stalled
from services.scheduler.transitions import transition

WORKERS_LOST = "the model workers were lost; the request was not completed"
STOP_SETTLE = 2.0
"""Seconds that a stopped rank goes on with open requests: the scheduler may be stopped within them, and drains then."""


class GroupStatus(NamedTuple):
    """Status of the group; a change is sent to all frontends at once."""

    phase: EnginePhase
    detail: str
    progress: float
    """Part of the weights that is loaded, 0 to 1."""
    num_workers: int


class WorkerGroup:
    """`tokenizer`: digest of the tokenizer.json of the scheduler's model, to compare with that of the workers' models;
    "": not compared."""

    def __init__(self, config: SchedulerConfig, incarnation: int = 0, tokenizer: str = "") -> None:
        self._config, self._tokenizer = config, tokenizer
        self.state = EnginePhase.WAITING_FOR_WORKERS
        self.roster = Roster()
        self.losses = Losses()
        self._epoch = Epoch(config, self.roster, incarnation)
        self._formation = Formation(config)
        self._contents = WeightContents()
        self._watch = StepWatch(config.step_timeout_seconds)
        self._recovering_since: float | None = None
        """When the last epoch in effect ended, while open requests wait for the next one."""
        self._detail, self._progress = self._formation.waits_for(0), 0.0
        self._retries_smaller = False
        """The message being handled ends the epoch for a lack of memory, and the next one forms smaller steps."""
        self._sign = 0
        """Number of the last sign of life."""
        self._actions: list[Action] = []

    # -- what the service reads ----------------------------------------------------------------------------------

    def take_actions(self) -> Iterator[Action]:
        """Yield what is to be done, in order, including what events add while it is done."""
        while self._actions:
            yield self._actions.pop(0)

    @property
    def status(self) -> GroupStatus:
        phase = self.state if self._recovering_since is None else EnginePhase.RECOVERING
        return GroupStatus(phase, self._detail, self._progress, len(self.roster))

    @property
    def failed(self) -> bool:
        """Return whether the group has given up; `status.detail` has the reason."""
        return self.state is EnginePhase.FAILED

    @property
    def settling(self) -> bool:
        """Return whether time alone may begin an epoch, so that `check` must be called again soon."""
        return self._formation.is_auto and self._best_size() not in (None, self.size)

    @property
    def is_stopped(self) -> bool:
        """Return whether there are too few workers because signals have stopped them."""
        waits = self.state is EnginePhase.WAITING_FOR_WORKERS and self._best_size() is None
        return waits and self.roster.last_was_stopped

    @property
    def epoch(self) -> int:
        """The current epoch, or the last one if there is none."""
        return self._epoch.id

    @property
    def size(self) -> GroupSize | None:
        """The size of the current epoch; None: there is none."""
        return self._epoch.size

    @property
    def backend(self) -> str:
        """The backend of the workers of the first epoch; "" before it."""
        return self._epoch.model.backend if self._epoch.model else ""

    def identity(self, longrope: str) -> str:
        """Return a digest of everything that tokens depend on, besides the tokenizer; "": there was no epoch.

        Args:
            longrope: `Loaded.longrope`
        """
        if (model := self._epoch.model) is None:
            return ""
        parts = f"{model.backend} {model.model_hash} {model.dtype} {longrope}".rstrip()
        return hashlib.sha256(parts.encode()).hexdigest()[:32]

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers of the current epoch by rank, on their machines."""
        return [member.register.pid for member in self.roster.ranks]

    def may_return(self, peer: bytes, epoch: int) -> bool:
        """Return whether this worker may send results of an epoch. Those of an epoch that is not in effect are ignored
        later, so any worker may."""
        return epoch != self._epoch.id or self.state is not EnginePhase.READY or peer == self._epoch.output_peer

    @property
    def unanswered(self) -> list[float]:
        """Seconds that a sign of life has waited for the answer of each rank of the epoch in effect, at least."""
        if self.state is not EnginePhase.READY:
            return []
        return [member.answers.seconds_without(self._sign) for member in self.roster.ranks]

    def stats(self) -> dict[str, float]:
        """Return gauges and totals by metric name, without a prefix."""
        return {
            "epoch": number_of(self.epoch),
            "epochs_lost_total": self.losses.total,
            "num_workers": len(self.roster),
            "weight_loads": self.roster.num_loads,
        }

    # -- events --------------------------------------------------------------------------------------------------

    def on_message(self, peer: bytes, message: WorkerMessage | StepFault, now: float) -> None:
        """Raises: ProtocolError, with nothing changed, for a message that the worker may not send in its state"""
        if self.failed:
            return
        if isinstance(message, Register):
            self._on_register(peer, message, now)
        else:
            event, reason = self.roster.receive(peer, message, self.epoch, now), reason_of(message)
            if isinstance(message, Loaded) and event is MemberEvent.LOADED and peer in self.roster:
                was_full, mismatch = self._contents.is_full, self._contents.mismatch(message.contents)
                if self._contents.is_full and not was_full:
                    self._actions.append(News(f"more than {MAX_PARTS:,} parts of weights: the others are not compared"))
                if mismatch is not None:
                    self._actions.append(Refuse(peer, mismatch))
                    event, reason = MemberEvent.LOST, f"has other weights: {mismatch}"
            if event is not None:
                self._retries_smaller = self._shrinks(message, now)
                self._member_event(peer, event, reason, now)
                self._retries_smaller = False
        self._form(now)

    def _shrinks(self, message: WorkerMessage | StepFault, now: float) -> bool:
        """If a step of the epoch in effect ran out of memory, let the next epoch form smaller steps. Return False if
        that was tried already and did not hold: then it is a failure like others."""
        if not isinstance(message, RankLost) or not message.out_of_memory:
            return False
        failed = self._watch.size_of(message.step_id)  # None also of an epoch that is not in effect
        if failed is None or (self._epoch.has_shrunk and not self.losses.is_proven(now)):
            return False
        if (most := self._epoch.shrink(failed)) is None:
            return False
        self._actions.append(News(f"steps have at most {most} from now on, as one ran out of memory"))
        return True

    def on_gone(self, peer: bytes, reason: str, now: float) -> None:
        """A worker is lost. Unknown peers are ignored."""
        if not self.failed:
            self._member_event(peer, MemberEvent.LOST, reason, now)
            self._form(now)

    def on_impossible_result(self, peer: bytes, error: str, now: float) -> None:
        """A result contradicts its plan: worker and scheduler disagree about the batch, so the worker must leave."""
        if not self.failed:
            self._actions.append(Refuse(peer, error))
            self.on_gone(peer, f"sent an impossible result: {error}", now)

    def on_dispatch(self, step_id: int, now: float, size: StepSize = SMALLEST) -> None:
        """A step of the epoch in effect is being sent to its ranks."""
        self._watch.on_dispatch(step_id, size, now)

    def on_result(self, epoch: int, step_id: int, now: float) -> bool:
        """The result of a step has arrived. Return whether its epoch is in effect; others are ignored."""
        is_useful = epoch == self._epoch.id and self.state is EnginePhase.READY
        if is_useful:
            self._watch.on_result(step_id, now)
            self.losses.on_useful(epoch)
        return is_useful

    def on_drop(self, names: bytes) -> None:
        """Blocks of the prefix cache lose their names on the ranks; those of `names` leave tiers, too."""
        self._actions += self._epoch.on_drop(names)

    def on_sign_of_life(self) -> int:
        """Return the number of the sign of life that is sent to every worker now."""
        self._sign += 1
        if self._watch.in_flight:
            for member in self.roster.ranks:
                member.answers.plans = self._sign
        return self._sign

    def on_pong(self, peer: bytes, number: int) -> None:
        """A worker has answered a sign of life on its connection for plans."""
        if peer in self.roster:
            answers = self.roster[peer].answers
            answers.plans = max(answers.plans, number)

    def check(self, now: float) -> None:
        """Apply the timeouts, and fail if no group is expected to serve. Actions must have been carried out: the last
        loss may be that of a request which is found with it."""
        if self.losses.hopeless:
            futile = f"{self.losses.futile} groups of workers in a row were lost before they served"
            self.fail(f"{futile}: {self.losses.last}", now)
        if self.failed:
            return
        timeout = self._config.heartbeat_timeout_seconds
        sign = self._sign if self.state is EnginePhase.READY else 0
        reasons = [(member.peer, overdue(member, now, timeout, sign)) for member in self.roster]
        for peer, late in reasons:
            if late is not None and not self.failed:
                self._member_event(peer, MemberEvent.GIVE_UP, late, now)
        if self.state is EnginePhase.LOADING:
            late = stalled(self.roster.ranks, now, self._config.load_timeout_seconds)
            if late is not None:
                self._group_event(GroupEvent.BREAK, f"{late}: {self._detail}", now)
        if self.state is EnginePhase.READY and (late_step := self._watch.overdue(now)) is not None:
            self._group_event(GroupEvent.BREAK, self._hang(*late_step), now)
        since = self._recovering_since
        if since is not None and now - since > self._config.recovery_timeout_seconds:
            self._end_requests()
        self._form(now)

    def _hang(self, step_id: int, took: float) -> str:
        """Return which step takes too long, and on which ranks."""
        ranks = ", ".join(str(member.rank) for member in self.roster.ranks if member.last_step < step_id)
        where = f" on rank {ranks}" if ranks else ""
        return f"step {step_id} has not ended{where} after {took:.1f} s, far longer than steps of its size take"

    def release_stopped(self, now: float, is_idle: bool) -> None:
        """Send away the ranks that a signal has stopped, at once if no request is open, and form a group without them.
        Call it unless the scheduler drains: then they serve until the open requests have ended."""
        stopped = [member for member in self.roster.ranks if member.stopped_at is not None]
        since = min((member.stopped_at for member in stopped if member.stopped_at is not None), default=math.inf)
        if self.failed or now - since < (0.0 if is_idle else STOP_SETTLE):
            return
        reason = self.roster.named(stopped[0].peer, "was stopped")
        self._actions += [Send(member.peer, Shutdown("this worker was stopped"), everywhere=True) for member in stopped]
        self._group_event(GroupEvent.RESIZE, reason, now)
        for member in stopped:
            self._member_event(member.peer, MemberEvent.LOST, "was stopped", now)
        self._form(now)

    def fail(self, reason: str, now: float) -> None:
        """The engine cannot serve with this group."""
        if not self.failed:
            self._group_event(GroupEvent.FAIL, reason, now)

    def shut_down(self, reason: str) -> None:
        """Send all workers away: the scheduler ends."""
        self._actions += [Send(member.peer, Shutdown(reason), everywhere=True) for member in self.roster]

    # -- a worker ------------------------------------------------------------------------------------------------

    def _on_register(self, peer: bytes, register: Register, now: float) -> None:
        others = (member.register for member in self.roster if member.peer != peer)
        num_others = None if peer in self.roster else len(self.roster)
        model = self._epoch.model or next(others, None)
        refusal = objection(register, model, num_others, self._config, self._tokenizer)
        if refusal is not None:
            self._member_event(peer, MemberEvent.LOST, "registered as something else", now)
            self._actions.append(Refuse(peer, refusal))
            return
        if register.returns:
            self._formation.on_return(now)
        self.roster.add(peer, register, now)
        self._member_event(peer, MemberEvent.REGISTER, reason_of(register), now)

    def _member_event(self, peer: bytes, event: MemberEvent, reason: str, now: float) -> None:
        """`reason`: what happened, to follow the name of the worker.

        Raises: IllegalTransition, with nothing changed
        """
        reason = self.roster.named(peer, reason)
        for action in self.roster.apply(peer, event, now):
            self._act_for_member(action, peer, reason, now)

    def _act_for_member(self, action: MemberAction, peer: bytes, reason: str, now: float) -> None:
        match action:
            case MemberAction.JOIN:
                self._on_change(self.roster.named(peer, "has registered"), now)
            case MemberAction.LEAVE:
                self._on_change(reason, now)
            case MemberAction.BREAK:
                self._group_event(GroupEvent.BREAK, reason, now)
            case MemberAction.DISMISS:
                self._actions.append(Send(peer, EndEpoch(self.epoch, reason), everywhere=True))
            case MemberAction.BLAME:
                self.losses.last = reason
            case MemberAction.SHOW:
                self._show_progress(self.roster[peer], now)
            case MemberAction.ADVANCE:
                self._advance(now)

    def _on_change(self, text: str, now: float) -> None:
        """A worker came or went."""
        self._formation.on_change(now)
        self._actions.append(News(f"{text}; workers: {len(self.roster)}"))

    def _show_progress(self, member: Member, now: float) -> None:
        member.since = now
        if member.progress is not None and self.size is not None:
            self._detail, self._progress = member.progress.phase, member.progress.fraction / self.size.world

    # -- the group -----------------------------------------------------------------------------------------------

    def _best_size(self) -> GroupSize | None:
        return self._formation.best_size(list(self.roster))

    def _form(self, now: float) -> None:
        """Begin an epoch if there is none and enough workers are spare; under `auto`, end one that should grow or
        shrink."""
        if self.failed or self.losses.hopeless or (self.size is not None and not self._formation.is_auto):
            return
        best, settled = self._best_size(), self._formation.settled(now)
        if self.size is not None:
            if settled and best not in (None, self.size):
                self._group_event(GroupEvent.RESIZE, f"the group is formed anew with {best.world} workers", now)
        elif settled and best is not None and len(spares := self.roster.spares) >= best.world:
            if self._formation.awaits_weights(spares, best, now):
                self._detail = "waiting for workers that have the weights in memory"
                return
            self._formation.on_formed()
            self._group_event(GroupEvent.FORM, "", now)
        else:
            waits = self._formation.waits_for(len(self.roster))
            self._detail = f"{waits} ({self.losses.last})" if self.losses.last else waits

    def _advance(self, now: float) -> None:
        """A rank has loaded or is ready: begin the next phase if all ranks have reached the same one."""
        if self._epoch.all_are(MemberState.READY):
            self._group_event(GroupEvent.READY, "", now)
        elif self._epoch.all_are(MemberState.LOADED):
            try:
                self._epoch.limits()
            except GroupError as error:
                self._group_event(GroupEvent.FAIL, str(error), now)
            else:
                self._group_event(GroupEvent.LOADED, "", now)

    def _group_event(self, event: GroupEvent, reason: str, now: float) -> None:
        """Raises: IllegalTransition, with nothing changed"""
        self.state, actions = transition(GROUP_TABLE, self.state, event, "the group")
        for action in actions:
            self._act(action, event, reason, now)

    def _act(self, action: GroupAction, event: GroupEvent, reason: str, now: float) -> None:
        is_fault = event is GroupEvent.BREAK and not self._retries_smaller
        match action:
            case GroupAction.ASSIGN:
                self._assign(now)
            case GroupAction.INITIALIZE:
                self._detail, self._progress = "allocating the KV cache", 1.0
                self._actions += self._epoch.initialize(now)
            case GroupAction.START:
                self.losses.on_start(now)
                for member in self.roster.ranks:
                    member.answers.start = self._sign
                self._recovering_since = None
                self._detail, self._progress = "ready", 1.0
                self._actions.append(self._epoch.start())
            case GroupAction.END:
                self._detail, self._progress = reason, 0.0
                self._actions += self._epoch.end(reason, is_fault, now)
            case GroupAction.VOID:
                self.losses.on_end(self.epoch, now)
                self._recovering_since = now
                self._watch.reset()
                self._actions.append(Ended(self.epoch, reason, is_fault))
            case GroupAction.COUNT:
                self.losses.on_fault(self.epoch, reason)
            case GroupAction.END_REQUESTS:
                self._end_requests()
            case GroupAction.SHUT_DOWN:
                self._detail = reason
                self.shut_down(reason)

    def _end_requests(self) -> None:
        self._recovering_since = None
        self._actions.append(FailRequests(WORKERS_LOST))

    def _assign(self, now: float) -> None:
        best = self._best_size()
        assert best is not None
        self._actions += self._epoch.begin(best, now)
        model = self._epoch.model.model if self._epoch.model is not None else ""
        self._detail, self._progress = f"loading {model or 'the default model'}", 0.0
