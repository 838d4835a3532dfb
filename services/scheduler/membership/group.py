"""Who computes: the worker group as a state machine without I/O or clock. Events go in, actions come out.

    SPARE         registered, belongs to no epoch
    LOADING       has its assignment, reads its weights
    LOADED        waits for the others, so that all get the same cache size
    INITIALIZING  allocates the cache and runs the canary step with the others
    READY         serves
    RETURNING     its epoch has ended; it has not registered again yet

An epoch is one life of a group. It begins when enough workers have registered, and ends when one of its members is
lost, says that it lost another, or hangs, or when `--tensor-parallel-size auto` finds a better size. All that survive
return to registration, where the next epoch takes its members from. At most one epoch is in effect at any time.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from protocol.membership import (
    Assignment,
    EndEpoch,
    GroupMessage,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadFailed,
    LoadProgress,
    RankLost,
    Ready,
    Register,
    Shard,
    WorkerMessage,
)
from protocol.requests import EnginePhase
from services.config import SchedulerConfig
from services.scheduler.capabilities import Combination, refusal
from services.scheduler.core.limits import Limits
from services.scheduler.membership.sizes import GroupError, fit, speculation

LOAD_SILENCE = 30.0
"""Seconds of silence that loading excuses at least: importing and compiling can hold up even the heartbeat."""
RETURN_TIMEOUT = 15.0
"""Seconds until a worker whose epoch has ended must have registered again."""
TAKE_TIMEOUT = 15.0
"""Seconds until a worker's heartbeats must speak of the epoch that it was assigned to: a spare waits for nothing else.
One that is heard, but does not, hangs."""
LOAD_STALL = 1800.0
"""Seconds in which one rank at least of an epoch that is not in effect yet must come further: a rank may hang there,
and its heart beat on."""
MAX_FUTILE_EPOCHS = 5
"""Epochs in a row that may end without having finished a step."""
PROVEN_AFTER = 60.0
"""Seconds in effect after which an epoch was worth something even if nobody asked for a step."""


class State(enum.Enum):
    SPARE = enum.auto()
    LOADING = enum.auto()
    LOADED = enum.auto()
    INITIALIZING = enum.auto()
    READY = enum.auto()
    RETURNING = enum.auto()


IN_EPOCH = (State.LOADING, State.LOADED, State.INITIALIZING, State.READY)


@dataclass(frozen=True)
class Send:
    """`everywhere`: on all connections of the worker, because its executing thread may hang."""

    peer: bytes
    message: GroupMessage
    everywhere: bool = False


@dataclass(frozen=True)
class Refuse:
    """Turn this worker away for good."""

    peer: bytes
    reason: str


@dataclass(frozen=True)
class Started:
    """An epoch is in effect: steps may be dispatched to `peers`, in order of rank."""

    epoch: int
    peers: list[bytes]
    limits: Limits
    loaded: Loaded


@dataclass(frozen=True)
class Ended:
    """The epoch that was in effect is over: nothing in flight will return."""

    reason: str


Action = Send | Refuse | Started | Ended


@dataclass
class Member:
    peer: bytes
    register: Register
    state: State
    since: float
    """When it entered this state."""
    last_seen: float
    rank: int = -1
    loaded: Loaded | None = None
    last_step: int = 0
    has_taken_rank: bool = False
    """It has said something that shows that it knows of its assignment."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.register.hostname or 'worker'}:{self.register.pid}"


@dataclass
class WorkerGroup:
    config: SchedulerConfig
    epoch: int = 0
    phase: EnginePhase = EnginePhase.WAITING_FOR_WORKERS
    detail: str = "waiting for a worker to register"
    progress: float = 0.0
    members: dict[bytes, Member] = field(default_factory=dict)
    epochs_lost: int = 0
    """Epochs that ended because of a fault."""
    news: list[str] = field(default_factory=list)
    """Who came and who was lost, for the log; emptied by who writes it."""
    _actions: list[Action] = field(default_factory=list)
    _model: Register | None = None
    """What the workers of the first epoch were; the frontends' tokenizer belongs to it."""
    _in_effect: bool = False
    _served: bool = False
    """Whether an epoch was ever in effect: then requests may be open."""
    _last_fault: str = ""
    _changed_at: float = 0.0
    """When a worker last came or went; `auto` waits for this to settle."""
    _size: tuple[int, int] = (0, 0)
    """Tensor- and pipeline-parallel size of the current epoch; zeros: there is none."""
    _futile: int = 0
    _came_further_at: float = 0.0
    """When a rank of the current epoch did something for the last time before all are ready."""
    _started_at: float = 0.0
    """When the last epoch came into effect."""

    def take_actions(self) -> Iterator[Action]:
        """What to do, in order; including what doing it brings about."""
        while self._actions:
            yield self._actions.pop(0)

    # -- events --------------------------------------------------------------------------------------------------

    def on_message(self, peer: bytes, message: WorkerMessage, now: float) -> None:
        """Raises: GroupError"""
        member = self.members.get(peer)
        if isinstance(message, Register):
            self._on_register(peer, message, now)
            return
        if member is None:
            if isinstance(message, LoadFailed):
                self._last_fault = message.error
                self._describe(self._wanted())
            return  # lost before; it learns of it by `EndEpoch`, and registers again
        member.last_seen = now
        match message:
            case Heartbeat(epoch=epoch, last_step_id=step):
                member.last_step = step if epoch == self.epoch else 0
                member.has_taken_rank |= epoch == self.epoch
            case LoadProgress(phase=phase, fraction=fraction) if member.state is State.LOADING:
                self.detail, self.progress = phase, fraction / max(1, self._world)
                self._came_further_at = now
                member.has_taken_rank = True
            case Loaded(epoch=epoch) if epoch == self.epoch and member.state is State.LOADING:
                member.loaded = message
                self._become(member, State.LOADED, now)
                self._initialize_when_loaded(now)
            case Ready(epoch=epoch) if epoch == self.epoch and member.state is State.INITIALIZING:
                self._become(member, State.READY, now)
                self._start_when_ready(now)
            case LoadFailed(error=error):
                self._lose(member, f"worker {member.name} cannot serve: {error}", now)
            case RankLost(epoch=epoch, error=error) if epoch == self.epoch and member.state in IN_EPOCH:
                self._end(f"worker {member.name} lost another rank: {error}", now)
            case _:
                pass  # of an epoch before
        self._form(now)

    def on_gone(self, peer: bytes, reason: str, now: float) -> None:
        """The worker's connection broke, or it failed in a step. Unknown peers are ignored."""
        member = self.members.get(peer)
        if member is not None:
            self._lose(member, f"worker {member.name} {reason}", now)
            self._form(now)

    def on_hang(self, reason: str, now: float) -> None:
        """A step took too long: whoever is stuck must register again, or is lost."""
        self._end(reason, now)
        self._form(now)

    def on_step(self) -> None:
        """A step was finished: this epoch was worth something."""
        self._futile = 0

    def check(self, now: float) -> None:
        """Silence and time-outs. Raises: GroupError"""
        for member in list(self.members.values()):
            if (why := self._given_up(member, now)) is not None:
                self._lose(member, f"worker {member.name} {why}", now)
                if member.state is not State.RETURNING:  # it has not been told yet
                    self._send(member.peer, EndEpoch(self.epoch, f"this worker {why}"), True)
        if self._world and not self._in_effect and now - self._came_further_at > LOAD_STALL:
            self._end(f"no worker came further for {LOAD_STALL:.0f} s: {self.detail}", now)
        self._form(now)

    def _given_up(self, member: Member, now: float) -> str | None:
        """Why, or None."""
        if member.state is State.RETURNING:
            is_late = now - member.since > RETURN_TIMEOUT
            return "did not come back from the epoch before" if is_late else None
        silence = now - member.last_seen
        if silence > self._patience(member):
            return f"was silent for {silence:.1f} s"
        is_deaf = member.state is State.LOADING and not member.has_taken_rank
        if is_deaf and member.last_seen - member.since > TAKE_TIMEOUT:
            return "is alive, but does not take up its rank"
        return None

    def _patience(self, member: Member) -> float:
        timeout = self.config.heartbeat_timeout_seconds
        return timeout if member.state is State.READY else max(timeout, LOAD_SILENCE)

    # -- members come and go -------------------------------------------------------------------------------------

    def _on_register(self, peer: bytes, register: Register, now: float) -> None:
        member = self.members.get(peer)
        objection = self._objection(peer, register)
        if objection is not None:
            if member is not None:
                self._lose(member, f"worker {member.name} registered as something else", now)
            self._actions.append(Refuse(peer, objection))
            return
        if member is None:
            self._changed_at = now
        elif member.state in IN_EPOCH:  # it left the epoch by itself
            self._end(f"worker {member.name} registered again", now)
        self.members[peer] = Member(peer, register, State.SPARE, now, now)
        if member is None:
            self._tell(f"worker {self.members[peer].name} has registered")
        self._form(now)

    def _objection(self, peer: bytes, register: Register) -> str | None:
        """Why this worker cannot be used, with both values, or None."""
        if (model := self._reference(peer)) is not None:
            for what in ("backend", "model_hash", "dtype"):
                ours, theirs = getattr(model, what), getattr(register, what)
                if ours != theirs:
                    name = what.replace("_", " ")
                    return (
                        f"{name} mismatch: this worker has {theirs!r}, the group {ours!r} "
                        f"(model {register.model or 'demo'!r} and {model.model or 'demo'!r})"
                    )
        if (why := refusal(Combination.of(self.config, register.backend))) is not None:
            return why
        tp, pp = self.config.tensor_parallel_size, self.config.pipeline_parallel_size
        sizes = register.tensor_parallel_sizes
        if tp != "auto" and tp not in sizes:
            return f"--tensor-parallel-size {tp}: the model can be cut into {', '.join(map(str, sizes))}"
        if pp > register.max_pipeline_parallel_size:
            most = register.max_pipeline_parallel_size
            return f"--pipeline-parallel-size {pp}: the model can be cut into at most {most} stages"
        wanted = max(sizes) if tp == "auto" else tp
        most = wanted * pp + self.config.max_spare_workers
        if peer not in self.members and len(self.members) >= most:
            return (
                f"the group has {len(self.members)} workers: {wanted * pp} ranks and "
                f"{self.config.max_spare_workers} spares (--max-spare-workers) are wanted at most"
            )
        return None

    def _reference(self, peer: bytes) -> Register | None:
        if self._model is not None:
            return self._model
        return next((m.register for m in self.members.values() if m.peer != peer), None)

    def _lose(self, member: Member, reason: str, now: float) -> None:
        del self.members[member.peer]
        self._changed_at = now
        self._tell(reason)
        if member.state in IN_EPOCH:
            self._end(reason, now)

    # -- an epoch's life -----------------------------------------------------------------------------------------

    @property
    def _world(self) -> int:
        return self._size[0] * self._size[1]

    @property
    def backend(self) -> str:
        """Of the workers that have served; "" before."""
        return self._model.backend if self._model else ""

    @property
    def tensor_parallel_size(self) -> int:
        """Of the current epoch; 0: there is none."""
        return self._size[0]

    @property
    def forming(self) -> bool:
        """Whether time alone may bring about a group: `check` must be called again soon."""
        return self.config.tensor_parallel_size == "auto" and self._wanted() not in (None, self._size)

    def _ranks(self) -> list[Member]:
        """The members of the current epoch, in order of rank."""
        return sorted((m for m in self.members.values() if m.state in IN_EPOCH), key=lambda m: m.rank)

    def _wanted(self) -> tuple[int, int] | None:
        """The sizes to form a group of with the workers there are, or None."""
        tp, pp = self.config.tensor_parallel_size, self.config.pipeline_parallel_size
        if tp != "auto":
            return (tp, pp) if len(self.members) >= tp * pp else None
        allowed = [set(m.register.tensor_parallel_sizes) for m in self.members.values()]
        sizes = set.intersection(*allowed) if allowed else set()
        fits = [size for size in sizes if size * pp <= len(self.members)]
        return (max(fits), pp) if fits else None

    def _form(self, now: float) -> None:
        """Begins an epoch if there is none and one can be formed; under `auto`, makes room for a better one."""
        wanted, is_auto = self._wanted(), self.config.tensor_parallel_size == "auto"
        if is_auto and now - self._changed_at < self.config.settle_seconds:
            self._describe(wanted)
            return
        if self._world:
            if is_auto and wanted is not None and wanted != self._size:
                self._end(
                    f"the group is formed anew with {wanted[0] * wanted[1]} workers", now, is_fault=False
                )
            return
        spares = [m for m in self.members.values() if m.state is State.SPARE]
        if wanted is None or len(spares) < wanted[0] * wanted[1]:
            self._describe(wanted)
            return
        self._begin(wanted, spares, now)

    def _begin(self, size: tuple[int, int], spares: list[Member], now: float) -> None:
        self.epoch += 1
        self._size = size
        ranks = _seat(spares, *size)
        self._model = self._model or ranks[0].register
        rendezvous = ranks[0].register.rendezvous if len(ranks) > 1 else ""
        for rank, member in enumerate(ranks):
            member.rank, member.loaded, member.last_step, member.has_taken_rank = rank, None, 0, False
            self._become(member, State.LOADING, now)
            self._send(member.peer, self._assignment(rank, rendezvous))
        self.phase = EnginePhase.RECOVERING if self._served else EnginePhase.LOADING
        self.detail, self.progress = f"loading {self._model.model or 'the demo model'}", 0.0

    def _assignment(self, rank: int, rendezvous: str) -> Assignment:
        c, (tp, pp) = self.config, self._size
        return Assignment(
            epoch=self.epoch,
            rank=rank,
            world_size=tp * pp,
            block_size=c.block_size,
            num_slots=2 * c.max_num_seqs,
            max_num_batched_tokens=c.max_num_batched_tokens,
            max_model_len=c.max_model_len or 0,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            rendezvous=rendezvous,
            speculation=speculation(c),
        )

    def _initialize_when_loaded(self, now: float) -> None:
        ranks = self._ranks()
        if len(ranks) == self._world and all(m.state is State.LOADED for m in ranks):
            limits = fit(self.config, [m.loaded for m in ranks if m.loaded is not None])
            for member in ranks:
                self._become(member, State.INITIALIZING, now)
                self._send(member.peer, InitializeCache(limits.num_blocks, limits.max_model_len))

    def _start_when_ready(self, now: float) -> None:
        ranks = self._ranks()
        loaded = [m.loaded for m in ranks if m.loaded is not None]
        if len(loaded) == self._world and all(m.state is State.READY for m in ranks):
            self._in_effect = self._served = True
            self._started_at = now
            self._last_fault = ""
            self.phase, self.detail, self.progress = EnginePhase.READY, "ready", 1.0
            peers = [m.peer for m in ranks]
            self._actions.append(Started(self.epoch, peers, fit(self.config, loaded), loaded[0]))

    def _end(self, reason: str, now: float, is_fault: bool = True) -> None:
        """Ends the current epoch, wherever it stands; its members return to registration."""
        if not self._world:
            return
        ranks = self._ranks()
        self._size = (0, 0)
        for member in ranks:
            self._become(member, State.RETURNING, now)
            self._send(member.peer, EndEpoch(self.epoch, reason), everywhere=True)
        if self._in_effect:
            self._actions.append(Ended(reason))
            if now - self._started_at >= PROVEN_AFTER:
                self._futile = 0
        self._in_effect = False
        self.phase = EnginePhase.RECOVERING if self._served else EnginePhase.WAITING_FOR_WORKERS
        self.detail, self.progress = reason, 0.0
        if is_fault:
            self._last_fault = reason
            self.epochs_lost += 1
            self._futile += 1
            if self._futile >= MAX_FUTILE_EPOCHS:
                raise GroupError(
                    f"{self._futile} groups of workers in a row were lost before they served: {reason}"
                )

    # -- small things --------------------------------------------------------------------------------------------

    def _become(self, member: Member, state: State, now: float) -> None:
        member.state, member.since = state, now
        self._came_further_at = now

    def _send(self, peer: bytes, message: GroupMessage, everywhere: bool = False) -> None:
        self._actions.append(Send(peer, message, everywhere))

    def _tell(self, what: str) -> None:
        self.news.append(f"{what}; there are {len(self.members)} workers")

    def _describe(self, wanted: tuple[int, int] | None) -> None:
        """What people are told while there is no group."""
        if self._world:
            return
        there, c = len(self.members), self.config
        if not there:
            text = "waiting for a worker to register"
        elif c.tensor_parallel_size == "auto":
            text = f"{there} workers have registered; waiting {c.settle_seconds:g} s for more"
        else:
            needed = c.tensor_parallel_size * c.pipeline_parallel_size
            text = f"waiting for workers: {there} of {needed} have registered"
        self.detail = f"{text} ({self._last_fault})" if self._last_fault else text


def _seat(spares: list[Member], tp: int, pp: int) -> list[Member]:
    """A member for each rank; who has a rank's weights in memory gets that rank again."""
    seats: list[Member | None] = [None] * (tp * pp)
    others = []
    for member in spares:
        shard = member.register.shard
        rank = -1 if shard is None else shard.pp_rank * tp + shard.tp_rank
        if shard == Shard(rank % tp, tp, rank // tp, pp) and seats[rank] is None:
            seats[rank] = member
        else:
            others.append(member)
    return [member or others.pop(0) for member in seats]
