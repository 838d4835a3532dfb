"""Workers that come, go, hang and stop around the production `WorkerGroup`, on a virtual clock.

Each worker is a production `Session` with an oracle for its compute; connections deliver in order, each with delays of
its own. Whatever needs other ranks (joining, the canary step, every step) is done when all ranks of the epoch do it.
Every action of the group is checked as it is taken, and a message that its receiver has no place for raises.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from protocol.codec import Decoder, encode
from protocol.membership import (
    Assignment,
    EndEpoch,
    GroupMessage,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadFailed,
    RankLost,
    Ready,
    Register,
    Shard,
    Shutdown,
    WorkerMessage,
)
from protocol.requests import EnginePhase
from protocol.steps import ModelRunnerOutput, ReleaseSlots, SchedulerOutput, StepMessage
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.membership.group import (
    IN_EPOCH,
    MAX_FUTILE_EPOCHS,
    Ended,
    Refuse,
    Send,
    Started,
    State,
    WorkerGroup,
)
from services.scheduler.membership.sizes import GroupError
from services.worker.session import Execute, Phase, Session
from tests.simulation.invariants import demand
from tests.simulation.oracle import OracleWorker

VOCAB = 64
HEARTBEAT, ABORT_GRACE, JOIN_TIMEOUT, STEP_TIMEOUT = 0.5, 8.0, 20.0, 10.0
"""Seconds, as in the worker; what lacks a rank gives up after JOIN_TIMEOUT if nobody tells it."""
_MESSAGES: Decoder[StepMessage | GroupMessage] = Decoder(StepMessage | GroupMessage)
_WORDS: Decoder[WorkerMessage] = Decoder(WorkerMessage)
_RESULTS: Decoder[ModelRunnerOutput] = Decoder(ModelRunnerOutput)


@dataclass(frozen=True)
class Nature:
    """What a worker is like."""

    num_blocks: int = 64
    load_seconds: float = 1.0
    fails_to_load: bool = False
    model_hash: str = "hash"
    dtype: str = "float32"
    backend: str = "sim"
    sizes: tuple[int, ...] = (1, 2, 4)


class Worker:
    """One process: an executing thread that takes messages in turn, and one that beats and listens meanwhile."""

    def __init__(self, cluster: "Cluster", name: str, nature: Nature) -> None:
        self.cluster, self.name, self.nature = cluster, name, nature
        self.peer = name.encode()
        self.session = Session()
        self.alive, self.paused, self.stuck = True, False, False
        self.stopped_at = 0.0
        self.refused = ""
        self.busy = False
        self.waits_for: tuple[int, str, int] | None = None
        """The collective operation it is in: (epoch, what, step)."""
        self.assignment: Assignment | None = None
        self.oracle: OracleWorker | None = None
        self.registered = 0
        self._then: Callable[[], None] = lambda: None
        self._shard: Shard | None = None
        self._ended = 0
        """The last epoch of which the second connection said that it is over."""
        self._inbox: deque[bytes] = deque()
        self._held: deque[Callable[[], None]] = deque()
        """What would have happened while it was stopped."""
        self._register()
        self._beat()

    @property
    def healthy(self) -> bool:
        return self.alive and not self.paused and not self.stuck

    def do(self, what: Callable[[], None]) -> None:
        """Now, or when the process goes on; never, if it is dead."""
        if self.paused:
            self._held.append(what)
        elif self.alive:
            what()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self.cluster.after(seconds, lambda: self.do(what))

    def stop(self) -> None:
        """SIGSTOP."""
        self.paused, self.stopped_at = True, self.cluster.now

    def go_on(self) -> None:
        """SIGCONT."""
        self.paused = False
        while self._held and self.alive:
            self._held.popleft()()

    # -- both threads --------------------------------------------------------------------------------------------

    def hear(self, frame: bytes) -> None:
        """A message on the main connection."""
        self._inbox.append(frame)
        self._work()

    def hang(self) -> None:
        """In a step or while loading, for good; on its way out of an epoch it does not."""
        leaving = self.session.epoch <= self._ended and self.session.phase is not Phase.REGISTERED
        self.stuck = self.stuck or not leaving

    def hear_aside(self, message: EndEpoch) -> None:
        """The end of an epoch, on the other connection."""
        self._ended = max(self._ended, message.epoch)
        epoch = self.session.epoch
        if self.stuck:
            self.later(ABORT_GRACE, lambda: self.cluster.kill(self))
        elif self.waits_for is not None and epoch <= self._ended:
            self._lose_ranks("interrupted")

    def _beat(self) -> None:
        rank = self.assignment.rank if self.assignment else 0
        self.cluster.tell_aside(self, Heartbeat(self.session.epoch, self.session.last_step, rank))
        self.later(HEARTBEAT, self._beat)

    # -- the executing thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._inbox and self.alive and not (self.busy or self.stuck or self.waits_for):
            action = self.session.on(_MESSAGES.decode(self._inbox.popleft()))
            match action:
                case Assignment():
                    self.assignment, self._shard, self.oracle = action, None, None
                    self._compute(self.nature.load_seconds, self._join)
                case InitializeCache():
                    self._compute(0.2, lambda cache=action: self._initialize(cache))  # type: ignore[misc]
                case EndEpoch():
                    self.oracle = None
                    self._register()
                case Shutdown():
                    self.cluster.kill(self)
                case Execute(step=step):
                    self._compute(self.cluster.step_seconds, lambda step=step: self._run(step))  # type: ignore[misc]
                case ReleaseSlots():
                    assert self.oracle is not None
                    self.oracle.receive(encode(action))
                case None:
                    pass
                case _:
                    raise AssertionError(f"{self.name} was made to {action}")

    def _compute(self, seconds: float, then: Callable[[], None]) -> None:
        self.busy = True

        def done() -> None:
            self.busy = False
            if not self.stuck:
                then()
                self._work()

        self.later(seconds * (0.5 + self.cluster.rng.random()), done)

    def _register(self) -> None:
        self.registered += 1
        n = self.nature
        self.cluster.tell(
            self,
            Register(
                n.backend, "m", self.name, 1, n.model_hash, n.dtype, n.sizes, 4, f"{self.name}:{self.registered}",
                self.session.epoch, self._shard,
            ),
        )  # fmt: skip

    def _join(self) -> None:
        if self.nature.fails_to_load:
            self.cluster.tell(self, LoadFailed("out of memory"))
            self.cluster.kill(self)
            return
        self._together("join", 0, self._loaded)

    def _loaded(self) -> None:
        assert self.assignment is not None
        self._shard = self.assignment.shard
        n = self.nature
        self.cluster.tell(
            self, Loaded(n.model_hash, VOCAB, 96, 64, n.num_blocks, True, self.assignment.epoch)
        )
        self.session.loaded()

    def _initialize(self, cache: InitializeCache) -> None:
        a = self.assignment
        assert a is not None
        limits = Limits(
            a.num_slots // 2, a.max_num_batched_tokens, cache.max_model_len, cache.num_blocks, a.block_size,
            stages=a.pipeline_parallel_size,
        )  # fmt: skip
        self.oracle = OracleWorker(limits, VOCAB, a.epoch)
        self.oracle.confirmed = 1 << 60  # what the scheduler knows is checked where it plans
        self._together("canary", 0, self._ready)

    def _ready(self) -> None:
        self.cluster.tell(self, Ready(self.session.epoch))
        self.session.ready()

    def _run(self, step: SchedulerOutput) -> None:
        def computed() -> None:
            assert self.oracle is not None
            assert self.assignment is not None
            result = self.oracle.receive(encode(step))
            if self.assignment.rank == self.assignment.output_rank and result is not None:
                self.cluster.send_result(self, result)

        self._together("step", step.step_id, computed)

    # -- with other ranks ----------------------------------------------------------------------------------------

    def _together(self, what: str, step: int, then: Callable[[], None]) -> None:
        epoch = self.session.epoch
        assert self.assignment is not None
        if self.assignment.world_size == 1:
            then()
            return
        self.waits_for, self._then = (epoch, what, step), then
        if epoch <= self._ended:
            self._lose_ranks("the epoch has ended")
        else:
            self.cluster.meet(self)

    def met(self) -> None:
        self.waits_for = None
        self._then()
        self._work()

    def miss(self, meeting: tuple[int, str, int]) -> None:
        """The collective operation failed, or was given up."""
        if self.waits_for == meeting and not self.stuck:
            self._lose_ranks("no answer")

    def _lose_ranks(self, why: str) -> None:
        self.waits_for = None
        self.session.ranks_lost()
        self.cluster.tell(self, RankLost(self.session.epoch, why))
        self._work()


class Cluster:
    def __init__(
        self, config: SchedulerConfig, seed: int, trace: Callable[[str], None] | None = None
    ) -> None:
        self.config, self.rng = config, Random(seed)
        self.group = WorkerGroup(config)
        self.now = 0.0
        self.workers: dict[bytes, Worker] = {}
        self.coverage: Counter[str] = Counter()
        self.effective: Started | None = None
        self.failed: GroupError | None = None
        """Why the group gave up."""
        self.step_seconds = 0.02
        self.starting = 0
        """Processes that will be started."""
        self.restarts = True
        """Whether a process that ended is started again."""
        self.on_started: Callable[[Started], None] = lambda started: None
        self.on_ended: Callable[[], None] = lambda: None
        self.serves: Callable[[], bool] = lambda: True
        """Whether a step is in flight."""
        self.on_result: Callable[[bytes], None] = lambda frame: None
        self._trace = trace
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._arrivals: dict[tuple[str, str], float] = {}
        """When the last message on a connection arrives: they do not overtake one another."""
        self._assigned: dict[int, dict[int, Worker]] = {}
        """epoch -> rank -> worker."""
        self._last: dict[bytes, str] = {}
        """What the group heard from or said to a worker last."""
        self._progress_at = 0.0
        self._futile = 0
        self.after(0.0, self._watch)

    def log(self, *parts: object) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:8.3f} " + " ".join(map(str, parts)))

    # -- time ----------------------------------------------------------------------------------------------------

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, what))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Goes on for so long, or until a condition holds or the group gives up. Whether the condition holds."""
        end = self.now + seconds
        while not until():
            if self.failed is not None or self._events[0][0] > end:
                self.now = max(self.now, end if self.failed is None else self.now)
                return until()
            self.now, _, what = heapq.heappop(self._events)
            what()
        return True

    def _watch(self) -> None:
        """What the service does between messages."""
        self._event(lambda: self.group.check(self.now))
        if self.effective is not None and self.serves() and self.now - self._progress_at > STEP_TIMEOUT:
            self.coverage["hangs noticed"] += 1
            self._event(lambda: self.group.on_hang("a step takes too long", self.now))
        patience = self.config.heartbeat_timeout_seconds + 0.5
        for peer in self.effective.peers if self.effective else ():
            worker = self.workers[peer]
            silent = worker.paused and self.now - worker.stopped_at > patience
            demand(not silent, "lost member", f"{worker.name} has been silent since {worker.stopped_at}")
        self.after(0.2, self._watch)

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self, nature: Nature) -> Worker:
        name = f"w{len(self.workers)}"
        self.log("start", name, nature)
        worker = self.workers[name.encode()] = Worker(self, name, nature)
        return worker

    def _start_again(self, nature: Nature) -> None:
        self.starting -= 1
        self.start(nature)

    def kill(self, worker: Worker) -> None:
        """The process ends: its connection breaks, and ranks that wait for it may notice."""
        if not worker.alive:
            return
        self.log("dead", worker.name, worker.session.phase.name)
        self.coverage[f"deaths: {worker.session.phase.name.lower()}"] += 1
        worker.alive = False
        epoch, peer = worker.session.epoch, worker.peer
        for other in self.workers.values():
            meeting = other.waits_for
            if other.alive and meeting is not None and meeting[0] == epoch and self.rng.random() < 0.7:
                self.after(self.rng.uniform(0.01, 1.0), lambda o=other, m=meeting: o.do(lambda: o.miss(m)))  # type: ignore[misc]
        self._deliver(worker.name, "main", lambda: self._gone(peer))
        if self.restarts and not worker.refused:
            nature = Nature(worker.nature.num_blocks, self.rng.choice((0.1, 1.0, 5.0)))
            self.starting += 1
            self.after(self.rng.uniform(0.5, 3.0), lambda: self._start_again(nature))

    def _gone(self, peer: bytes) -> None:
        member = self.group.members.get(peer)
        epoch = self.group.epoch if member is not None and member.state in IN_EPOCH else 0
        self._event(lambda: self.group.on_gone(peer, "is gone", self.now))
        demand(
            not epoch or self.group.epoch > epoch or not self.group._world, "lost member", "its epoch goes on"
        )

    # -- connections ---------------------------------------------------------------------------------------------

    def _deliver(self, name: str, connection: str, what: Callable[[], None]) -> None:
        key = (name, connection)
        at = max(self._arrivals.get(key, 0.0), self.now + self.rng.choice((0.0005, 0.002, 0.05)))
        self._arrivals[key] = at
        self.after(at - self.now, what)

    def tell(self, worker: Worker, message: WorkerMessage) -> None:
        frame = encode(message)

        def arrive() -> None:
            self.log(worker.name, "says", message)
            self._last[worker.peer] = type(message).__name__
            self._event(lambda: self.group.on_message(worker.peer, _WORDS.decode(frame), self.now))

        self._deliver(worker.name, "main", arrive)

    def tell_aside(self, worker: Worker, message: Heartbeat) -> None:
        self._deliver(
            worker.name,
            "aside",
            lambda: self._event(lambda: self.group.on_message(worker.peer, message, self.now)),
        )

    def send_result(self, worker: Worker, frame: bytes) -> None:
        def arrive() -> None:
            if self.effective is not None and _RESULTS.decode(frame).epoch == self.group.epoch:
                self.step_done()
            self.on_result(frame)

        self._deliver(worker.name, "aside", arrive)

    def broadcast(self, frame: bytes) -> None:
        """To every rank of the epoch in effect."""
        assert self.effective is not None
        for peer in self.effective.peers:
            self._send(self.workers[peer], frame)

    def _send(self, worker: Worker, frame: bytes) -> None:
        self._deliver(worker.name, "to main", lambda: worker.do(lambda: worker.hear(frame)))

    def awaits_step(self) -> None:
        """A step is dispatched after none was in flight."""
        self._progress_at = self.now

    def step_done(self) -> None:
        self._progress_at, self._futile = self.now, 0
        self.group.on_step()

    def meet(self, worker: Worker) -> None:
        """A rank reaches a collective operation."""
        meeting = worker.waits_for
        assert meeting is not None
        ranks = self._assigned[meeting[0]].values()
        if all(rank.alive and rank.waits_for == meeting for rank in ranks):
            for rank in list(ranks):
                self.after(0.001, lambda r=rank: r.do(lambda: r.waits_for == meeting and r.met()))  # type: ignore[misc]
        else:
            worker.later(JOIN_TIMEOUT, lambda: worker.miss(meeting))

    # -- the group -----------------------------------------------------------------------------------------------

    def _event(self, event: Callable[[], None]) -> None:
        """Something happens to the group, whose actions are taken and checked."""
        if self.failed is not None:
            return
        try:
            event()
        except GroupError as error:
            self.failed = error
        for action in self.group.take_actions():
            self.log(action)
            match action:
                case Send(peer, message, everywhere):
                    self._check_send(peer, message)
                    worker = self.workers[peer]
                    self._send(worker, encode(message))
                    if everywhere and isinstance(message, EndEpoch):
                        self._deliver(
                            worker.name, "to aside", lambda w=worker, m=message: w.do(lambda: w.hear_aside(m))
                        )  # type: ignore[misc]
                case Refuse(peer, reason):
                    self._on_refuse(self.workers[peer], reason)
                case Started():
                    self._check_started(action)
                    self.effective, self._progress_at = action, self.now
                    self.on_started(action)
                case Ended():
                    demand(self.effective is not None, "I5", "an epoch ended that was not in effect")
                    self.effective = None
                    self.on_ended()
        self._check_group()

    def _check_send(self, peer: bytes, message: GroupMessage) -> None:
        last, worker = self._last.get(peer), self.workers[peer]
        match message:
            case Assignment():
                demand(last == "Register", "phase", f"{worker.name} is assigned after {last}")
                ranks = self._assigned.setdefault(message.epoch, {})
                demand(message.epoch == self.group.epoch, "epoch", message)
                demand(
                    message.rank not in ranks, "ranks", f"rank {message.rank} twice in epoch {message.epoch}"
                )
                demand(worker not in ranks.values(), "ranks", f"{worker.name} has two ranks")
                ranks[message.rank] = worker
                if self._shard_of(worker) == message.shard:
                    self.coverage["weights kept"] += 1
            case InitializeCache():
                demand(last == "Loaded", "phase", f"{worker.name} gets its cache size after {last}")
            case EndEpoch() if message.epoch == self.group.epoch:
                if self._assigned.get(message.epoch) and worker in self._assigned[message.epoch].values():
                    self.coverage[f"ended: {worker.session.phase.name.lower()}"] += 1
        self._last[peer] = type(message).__name__

    @staticmethod
    def _shard_of(worker: Worker) -> Shard | None:
        return worker._shard

    def _on_refuse(self, worker: Worker, reason: str) -> None:
        n = worker.nature
        wrong = (n.model_hash, n.dtype, n.backend) != ("hash", "float32", "sim")
        full = "are wanted at most" in reason
        demand(wrong or full, "refusal", f"{worker.name}, a proper worker, is refused: {reason}")
        if wrong:
            ours, theirs = {"hash", "float32", "sim"}, {n.model_hash, n.dtype, n.backend}
            named = any(repr(a) in reason for a in ours - theirs) and any(
                repr(b) in reason for b in theirs - ours
            )
            demand(named, "refusal", f"does not name both values: {reason}")
        self.coverage["refused: " + ("other model" if wrong else "too many")] += 1
        worker.refused = reason
        self._deliver(worker.name, "to main", lambda: self.kill(worker))

    def _check_started(self, started: Started) -> None:
        demand(self.effective is None, "I5", f"epoch {started.epoch} begins while another is in effect")
        ranks = self._assigned[started.epoch]
        order = [ranks[rank].peer for rank in sorted(ranks)]
        demand(started.peers == order, "ranks", f"{started.peers} for ranks {order}")
        pp = started.limits.stages
        tp = len(ranks) // pp  # the group may have ended the epoch in the same breath
        demand(self.config.tensor_parallel_size in ("auto", tp), "ranks", f"{tp} x {pp}")
        demand(sorted(ranks) == list(range(tp * pp)), "ranks", f"{sorted(ranks)} for {tp} x {pp}")
        leader = ranks[0]
        for rank, worker in ranks.items():
            a, n = worker.assignment, worker.nature
            assert a is not None
            demand(
                (a.epoch, a.rank, a.world_size) == (started.epoch, rank, tp * pp),
                "ranks",
                f"{worker.name}: {a}",
            )
            demand(tp in n.sizes, "ranks", f"{worker.name} cannot be one of {tp}")
            demand(
                (n.model_hash, n.dtype, n.backend) == ("hash", "float32", "sim"),
                "model",
                f"{worker.name}: {n}",
            )
            demand(self._last[worker.peer] == "Ready", "phase", f"{worker.name} is not ready")
            held = a.rendezvous.rpartition(":")[0]
            demand(held == (leader.name if tp * pp > 1 else ""), "rendezvous", a.rendezvous)
        least = min(worker.nature.num_blocks for worker in ranks.values())
        demand(started.limits.num_blocks <= least, "cache", f"{started.limits.num_blocks} blocks of {least}")
        demand(started.limits.stages == pp == self.config.pipeline_parallel_size, "stages", pp)
        self.coverage[f"epochs of {tp} x {pp}"] += 1
        self.coverage["recoveries"] += started.epoch > 1

    def _check_group(self) -> None:
        group = self.group
        ranks = [m for m in group.members.values() if m.state in IN_EPOCH]
        demand(len(ranks) in (0, group._world), "ranks", f"{len(ranks)} of {group._world} are in the epoch")
        demand((self.effective is not None) == group._in_effect, "I5", "what is in effect")
        if self.effective is not None:
            demand(group.phase is EnginePhase.READY, "phase", group.phase)
            demand(all(m.state is State.READY for m in ranks), "phase", "serves without all ranks")
        if self.failed is not None:
            demand(
                group._futile >= MAX_FUTILE_EPOCHS or "does not fit" in str(self.failed),
                "giving up",
                self.failed,
            )
            return
        tp, pp = self.config.tensor_parallel_size, self.config.pipeline_parallel_size
        spares = sum(m.state is State.SPARE for m in group.members.values())
        if tp != "auto":  # spares take over at once
            demand(group._world or spares < tp * pp, "spares", f"{spares} spares wait, and no epoch begins")

    def complete(self) -> bool:
        """Whether the group knows every process that lives and was not refused, but for those that hang."""
        known = [m.peer for m in self.group.members.values() if m.state is not State.RETURNING]
        alive = [w for w in self.workers.values() if w.alive and not w.refused]
        return not self.starting and all(w.stuck or (w.healthy and w.peer in known) for w in alive)

    def sound(self) -> bool:
        """Whether the epoch in effect consists of healthy ranks that serve."""
        if self.effective is None:
            return False
        workers = [self.workers[peer] for peer in self.effective.peers]
        return all(w.healthy and w.session.phase is Phase.SERVING for w in workers)
