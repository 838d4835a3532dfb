"""Workers that come, go, hang and stop around the production `WorkerGroup`, on a virtual clock.

Connections deliver in order, each with delays of its own. An operation that needs all ranks (joining, the canary step,
every step) is done when all ranks of the epoch have reached it. Every action of the group is checked when it is taken,
and a message that its receiver may not get in its state raises.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random

from protocol.codec import Decoder, encode
from protocol.membership import (
    Assignment,
    EndEpoch,
    GroupMessage,
    Heartbeat,
    InitializeCache,
    Loaded,
    Ready,
    Register,
    WorkerMessage,
)
from protocol.requests import EnginePhase
from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepMessage
from services.config import SchedulerConfig
from services.scheduler.membership import Ended, FailRequests, News, Refuse, Send, Started, WorkerGroup
from services.scheduler.membership.group_states import GroupState
from services.scheduler.membership.losses import MAX_FUTILE_EPOCHS
from services.scheduler.membership.member_states import MemberState
from services.worker.session import Phase
from tests.simulation.invariants import demand
from tests.simulation.simulated_worker import SimulatedWorker, WorkerTraits

JOIN_TIMEOUT = 20.0
"""Seconds after which an operation that lacks a rank fails, as in the worker."""
STEP_INTERVAL = 0.5
"""Seconds between two steps of a group without an engine."""
RESULTS: Decoder[ModelRunnerOutput] = Decoder(ModelRunnerOutput)
_STEPS: Decoder[StepMessage] = Decoder(StepMessage)
_WORKER_MESSAGES: Decoder[WorkerMessage] = Decoder(WorkerMessage)
_FITTING = {"hash", "float32", "sim"}
"""Model hash, dtype and backend of the workers that fit."""


class SimulatedCluster:
    def __init__(
        self, config: SchedulerConfig, seed: int, trace: Callable[[str], None] | None = None
    ) -> None:
        self.config, self.rng = config, Random(seed)
        self.group = WorkerGroup(config)
        self.now = 0.0
        self.workers: dict[bytes, SimulatedWorker] = {}
        self.coverage: Counter[str] = Counter()
        self.effective: Started | None = None
        self.step_seconds = 0.02
        self.starting = 0
        """Processes that will be started."""
        self.restarts = True
        """True: a process that ended is started again."""
        self.started: Callable[[Started], None] = lambda started: None
        self.ended: Callable[[], None] = lambda: None
        self.result: Callable[[bytes], None] = lambda frame: None
        self._trace = trace
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._arrivals: dict[tuple[str, str], float] = {}
        """(worker, connection) -> when its last message arrives: messages do not overtake one another."""
        self._assigned: dict[int, dict[int, SimulatedWorker]] = {}
        """epoch -> rank -> worker."""
        self._last: dict[bytes, type] = {}
        """The last message that the group received from a worker or sent to it."""
        self._step = 0
        """The step in flight of a group without an engine; 0: none."""
        self.after(0.0, self._check)

    @property
    def failed(self) -> bool:
        return self.group.failed

    def log(self, *parts: object) -> None:
        if self._trace is not None:
            self._trace(f"{self.now:8.3f} " + " ".join(map(str, parts)))

    # -- time ----------------------------------------------------------------------------------------------------

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Run for so many seconds, or until a condition holds or the group fails. Return whether it holds."""
        end = self.now + seconds
        while not until():
            if self.failed or self._events[0][0] > end:
                self.now = max(self.now, self.now if self.failed else end)
                return until()
            self.now, _, action = heapq.heappop(self._events)
            action()
        return True

    def _check(self) -> None:
        """The service's regular check of the timeouts."""
        self._event(lambda: self.group.check(self.now))
        patience = self.config.heartbeat_timeout_seconds + 0.5
        for peer in self.effective.peers if self.effective else ():
            worker = self.workers[peer]
            silent = worker.paused and self.now - worker.stopped_at > patience
            demand(not silent, "lost member", f"{worker.name} has been silent since {worker.stopped_at}")
        self.after(0.2, self._check)

    # -- processes -----------------------------------------------------------------------------------------------

    def start(self, traits: WorkerTraits) -> SimulatedWorker:
        name = f"w{len(self.workers)}"
        self.log("start", name, traits)
        worker = self.workers[name.encode()] = SimulatedWorker(self, name, traits)
        return worker

    def _start_again(self, traits: WorkerTraits) -> None:
        self.starting -= 1
        self.start(traits)

    def kill(self, worker: SimulatedWorker) -> None:
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
            traits = WorkerTraits(worker.traits.num_blocks, self.rng.choice((0.1, 1.0, 5.0)))
            self.starting += 1
            self.after(self.rng.uniform(0.5, 3.0), lambda: self._start_again(traits))

    def _gone(self, peer: bytes) -> None:
        group = self.group
        epoch = group.epoch if peer in group.roster and group.roster[peer].in_epoch else 0
        self._event(lambda: group.on_gone(peer, "is gone", self.now))
        demand(not epoch or group.epoch > epoch or group.size is None, "lost member", "its epoch goes on")

    # -- connections ---------------------------------------------------------------------------------------------

    def _deliver(self, name: str, connection: str, action: Callable[[], None]) -> None:
        key = (name, connection)
        at = max(self._arrivals.get(key, 0.0), self.now + self.rng.choice((0.0005, 0.002, 0.05)))
        self._arrivals[key] = at
        self.after(at - self.now, action)

    def on_message(self, worker: SimulatedWorker, message: WorkerMessage) -> None:
        frame = encode(message)

        def arrive() -> None:
            self.log(worker.name, "sends", message)
            self._last[worker.peer] = type(message)
            self._count_late(worker, message)
            self._event(lambda: self.group.on_message(worker.peer, _WORKER_MESSAGES.decode(frame), self.now))

        self._deliver(worker.name, "main", arrive)

    def on_heartbeat(self, worker: SimulatedWorker, message: Heartbeat) -> None:
        self._deliver(
            worker.name,
            "second",
            lambda: self._event(lambda: self._on_heartbeat(worker, message)),
        )

    def _on_heartbeat(self, worker: SimulatedWorker, message: Heartbeat) -> None:
        self._count_late(worker, message)
        self.group.on_message(worker.peer, message, self.now)

    def _count_late(self, worker: SimulatedWorker, message: WorkerMessage) -> None:
        state = self.group.roster.state_of(worker.peer)
        late = state in (MemberState.UNKNOWN, MemberState.RETURNING, MemberState.SPARE)
        if late and not isinstance(message, Register) and self.group.epoch:
            self.coverage[f"late messages of a worker that is {state.name.lower()}"] += 1

    def on_result(self, worker: SimulatedWorker, frame: bytes) -> None:
        def arrive() -> None:
            result = RESULTS.decode(frame)
            self.group.on_result(result.epoch, result.step_id, self.now)
            self.result(frame)

        self._deliver(worker.name, "second", arrive)

    def broadcast(self, frame: bytes) -> None:
        """Send a message of the engine to every rank of the epoch in effect."""
        assert self.effective is not None
        message = _STEPS.decode(frame)
        if isinstance(message, SchedulerOutput):
            self.group.on_dispatch(message.step_id, self.now)
        for peer in self.effective.peers:
            self._send(self.workers[peer], frame)

    def _send(self, worker: SimulatedWorker, frame: bytes) -> None:
        self._deliver(worker.name, "to main", lambda: worker.do(lambda: worker.receive(frame)))

    def meet(self, worker: SimulatedWorker) -> None:
        """A rank reaches an operation that needs all ranks."""
        meeting = worker.waits_for
        assert meeting is not None
        ranks = self._assigned[meeting[0]].values()
        if all(rank.alive and rank.waits_for == meeting for rank in ranks):
            for rank in list(ranks):
                self.after(0.001, lambda r=rank: r.do(lambda: r.met(meeting)))  # type: ignore[misc]
        else:
            self.after(JOIN_TIMEOUT, lambda: worker.do(lambda: worker.miss(meeting)))

    # -- steps of a group without an engine ----------------------------------------------------------------------

    def run_steps(self) -> None:
        """Keep one step in flight from now on; it ends when all ranks are well."""
        if self.effective is not None and (not self._step or self.sound()):
            if self._step:
                self.group.on_result(self.effective.epoch, self._step, self.now)
            self._step += 1
            self.group.on_dispatch(self._step, self.now)
        self.after(STEP_INTERVAL, self.run_steps)

    # -- the group -----------------------------------------------------------------------------------------------

    def _event(self, event: Callable[[], None]) -> None:
        """An event of the group, whose actions are taken and checked."""
        if self.failed:
            return
        event()
        for action in self.group.take_actions():
            self.log(action)
            match action:
                case Send(peer, message, everywhere):
                    self._check_send(peer, message)
                    worker = self.workers[peer]
                    self._send(worker, encode(message))
                    if everywhere and isinstance(message, EndEpoch):
                        self._deliver(
                            worker.name,
                            "to second",
                            lambda w=worker, m=message: w.do(lambda: w.receive_end(m)),  # type: ignore[misc]
                        )
                case Refuse(peer, reason):
                    self._on_refuse(self.workers[peer], reason)
                case Started():
                    self._check_started(action)
                    self.effective, self._step = action, 0
                    self.started(action)
                case Ended(epoch, reason):
                    in_effect = self.effective is not None and self.effective.epoch == epoch
                    demand(in_effect, "one epoch in effect", "an epoch ended that was not in effect")
                    self.coverage["hangs noticed"] += "has not ended" in reason
                    self.effective = None
                    self.ended()
                case FailRequests():
                    demand(self.failed, "recovery", "requests failed although workers came in time")
                case News():
                    pass
        self._check_group()

    def _check_send(self, peer: bytes, message: GroupMessage) -> None:
        last, worker = self._last.get(peer), self.workers[peer]
        match message:
            case Assignment():
                demand(last is Register, "phase", f"{worker.name} is assigned after {last}")
                ranks = self._assigned.setdefault(message.epoch, {})
                demand(message.epoch == self.group.epoch, "epoch", message)
                demand(
                    message.rank not in ranks, "ranks", f"rank {message.rank} twice in epoch {message.epoch}"
                )
                demand(worker not in ranks.values(), "ranks", f"{worker.name} has two ranks")
                ranks[message.rank] = worker
                if worker.shard == message.shard:
                    self.coverage["weights kept"] += 1
            case InitializeCache():
                demand(last is Loaded, "phase", f"{worker.name} gets its cache size after {last}")
            case EndEpoch() if message.epoch == self.group.epoch:
                if worker in self._assigned.get(message.epoch, {}).values():
                    self.coverage[f"ended: {worker.session.phase.name.lower()}"] += 1
        self._last[peer] = type(message)

    def _on_refuse(self, worker: SimulatedWorker, reason: str) -> None:
        values = {worker.traits.model_hash, worker.traits.dtype, worker.traits.backend}
        wrong, crowded = values != _FITTING, "are the maximum" in reason
        demand(wrong or crowded, "refusal", f"{worker.name} fits, but is refused: {reason}")
        if wrong:
            named = any(repr(ours) in reason for ours in _FITTING - values) and any(
                repr(theirs) in reason for theirs in values - _FITTING
            )
            demand(named, "refusal", f"does not name both values: {reason}")
        self.coverage["refused: " + ("other model" if wrong else "too many")] += 1
        worker.refused = reason
        self._deliver(worker.name, "to main", lambda: self.kill(worker))

    def _check_started(self, started: Started) -> None:
        demand(self.effective is None, "one epoch in effect", f"epoch {started.epoch} begins beside another")
        ranks = self._assigned[started.epoch]
        order = [ranks[rank].peer for rank in sorted(ranks)]
        demand(started.peers == order, "ranks", f"{started.peers} for ranks {order}")
        pp = started.limits.stages
        tp = len(ranks) // pp  # the same event may have ended the epoch
        demand(self.config.tensor_parallel_size in ("auto", tp), "ranks", f"{tp} x {pp}")
        demand(sorted(ranks) == list(range(tp * pp)), "ranks", f"{sorted(ranks)} for {tp} x {pp}")
        for rank, worker in ranks.items():
            self._check_rank(started.epoch, rank, worker, tp, pp)
        least = min(worker.traits.num_blocks for worker in ranks.values())
        demand(started.limits.num_blocks <= least, "cache", f"{started.limits.num_blocks} blocks of {least}")
        demand(started.limits.stages == pp == self.config.pipeline_parallel_size, "stages", pp)
        self.coverage[f"epochs of {tp} x {pp}"] += 1
        self.coverage["recoveries"] += started.epoch > 1

    def _check_rank(self, epoch: int, rank: int, worker: SimulatedWorker, tp: int, pp: int) -> None:
        a, t = worker.assignment, worker.traits
        assert a is not None
        demand((a.epoch, a.rank, a.world_size) == (epoch, rank, tp * pp), "ranks", f"{worker.name}: {a}")
        demand(tp in t.sizes, "ranks", f"{worker.name} cannot be one of {tp}")
        demand({t.model_hash, t.dtype, t.backend} == _FITTING, "model", f"{worker.name}: {t}")
        demand(self._last[worker.peer] is Ready, "phase", f"{worker.name} is not ready")
        holder = a.rendezvous.rpartition(":")[0]
        leader = self._assigned[epoch][0]
        demand(holder == (leader.name if tp * pp > 1 else ""), "rendezvous", a.rendezvous)

    def _check_group(self) -> None:
        group, ranks = self.group, self.group.roster.ranks
        if group.failed:
            futile = group.losses.futile >= MAX_FUTILE_EPOCHS
            demand(futile or "does not fit" in group.status.detail, "giving up", group.status.detail)
            return
        world = group.size.world if group.size else 0
        demand(len(ranks) == world, "ranks", f"{len(ranks)} of {world} are in the epoch")
        is_ready = group.state is GroupState.READY
        demand((self.effective is not None) == is_ready, "one epoch in effect", group.state)
        if is_ready:
            demand(group.status.phase is EnginePhase.READY, "phase", group.status.phase)
            demand(all(m.state is MemberState.READY for m in ranks), "phase", "serves without all ranks")
        tp, pp = self.config.tensor_parallel_size, self.config.pipeline_parallel_size
        spares = sum(member.state is MemberState.SPARE for member in group.roster)
        if tp != "auto":  # spares take over at once
            demand(world or spares < tp * pp, "spares", f"{spares} spares wait, and no epoch begins")

    def complete(self) -> bool:
        """Return whether every process that lives, does not hang and was not refused is registered."""
        known = [m.peer for m in self.group.roster if m.state is not MemberState.RETURNING]
        alive = [w for w in self.workers.values() if w.alive and not w.refused]
        return not self.starting and all(w.stuck or (w.healthy and w.peer in known) for w in alive)

    def sound(self) -> bool:
        """Return whether the epoch in effect consists of healthy ranks that serve."""
        if self.effective is None:
            return False
        workers = [self.workers[peer] for peer in self.effective.peers]
        return all(w.healthy and w.session.phase is Phase.SERVING for w in workers)
