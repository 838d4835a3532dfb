"""A worker process of the simulated cluster: a production `Session`, with an oracle for its compute."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from protocol.codec import Decoder, encode
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
    Shutdown,
    WorkerMessage,
)
from protocol.steps import ReleaseSlots, SchedulerOutput, StepMessage
from services.scheduler.core.limits import Limits
from services.worker.session import ExecuteStep, Phase, Session
from tests.simulation.oracle import OracleWorker

VOCAB = 64
HEARTBEAT_INTERVAL, ABORT_GRACE = 0.5, 8.0
"""Seconds, as in the worker."""
_MESSAGES: Decoder[StepMessage | GroupMessage] = Decoder(StepMessage | GroupMessage)

Meeting = tuple[int, str, int]
"""An operation that needs all ranks: epoch, name, step id."""


@dataclass(frozen=True)
class WorkerTraits:
    """Registration and behaviour of a worker."""

    num_blocks: int = 64
    load_seconds: float = 1.0
    fails_to_load: bool = False
    model_hash: str = "hash"
    dtype: str = "float32"
    backend: str = "sim"
    sizes: tuple[int, ...] = (1, 2, 4)


class Surroundings(Protocol):
    """The part of the cluster that a worker uses."""

    now: float
    rng: Random
    step_seconds: float

    def after(self, seconds: float, action: Callable[[], None]) -> None: ...
    def kill(self, worker: "SimulatedWorker") -> None: ...
    def meet(self, worker: "SimulatedWorker") -> None: ...
    def on_message(self, worker: "SimulatedWorker", message: WorkerMessage) -> None: ...
    def on_heartbeat(self, worker: "SimulatedWorker", message: Heartbeat) -> None: ...
    def on_result(self, worker: "SimulatedWorker", frame: bytes) -> None: ...


class SimulatedWorker:
    """One process: a thread that executes messages in turn, and one that sends heartbeats and listens meanwhile."""

    def __init__(self, cluster: Surroundings, name: str, traits: WorkerTraits) -> None:
        self.cluster, self.name, self.traits = cluster, name, traits
        self.peer = name.encode()
        self.session = Session()
        self.alive, self.paused, self.stuck = True, False, False
        self.stopped_at = 0.0
        self.refused = ""
        self.waits_for: Meeting | None = None
        self.assignment: Assignment | None = None
        self.shard: Shard | None = None
        """The weights in memory."""
        self._oracle: OracleWorker | None = None
        self._registrations = 0
        self._busy = False
        self._then: Callable[[], None] = lambda: None
        self._ended = 0
        """The last epoch whose end arrived on the second connection."""
        self._inbox: deque[bytes] = deque()
        self._held: deque[Callable[[], None]] = deque()
        """Events that wait for the end of the stop."""
        self._register()
        self._beat()

    @property
    def healthy(self) -> bool:
        return self.alive and not self.paused and not self.stuck

    def do(self, action: Callable[[], None]) -> None:
        """Now, or when the process goes on; never, if it is dead."""
        if self.paused:
            self._held.append(action)
        elif self.alive:
            action()

    def stop(self) -> None:
        """SIGSTOP."""
        self.paused, self.stopped_at = True, self.cluster.now

    def go_on(self) -> None:
        """SIGCONT."""
        self.paused = False
        while self._held and self.alive:
            self._held.popleft()()

    def hang(self) -> None:
        """In a step or while loading, for good; not while it leaves an epoch."""
        leaving = self.session.epoch <= self._ended and self.session.phase is not Phase.REGISTERED
        self.stuck = self.stuck or not leaving

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.cluster.after(seconds, lambda: self.do(action))

    # -- both threads --------------------------------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """A message arrives on the main connection."""
        self._inbox.append(frame)
        self._work()

    def receive_end(self, message: EndEpoch) -> None:
        """The end of an epoch arrives on the second connection."""
        self._ended = max(self._ended, message.epoch)
        if self.stuck:
            self._later(ABORT_GRACE, lambda: self.cluster.kill(self))
        elif self.waits_for is not None and self.session.epoch <= self._ended:
            self._lose_ranks("interrupted")

    def _beat(self) -> None:
        self.cluster.on_heartbeat(self, Heartbeat(self.session.epoch, self.session.last_step))
        self._later(HEARTBEAT_INTERVAL, self._beat)

    # -- the executing thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._inbox and self.alive and not (self._busy or self.stuck or self.waits_for):
            action = self.session.on(_MESSAGES.decode(self._inbox.popleft()))
            match action:
                case Assignment():
                    self.assignment, self.shard, self._oracle = action, None, None
                    self._compute(self.traits.load_seconds / 2, self._load)
                case InitializeCache():
                    self._compute(0.2, lambda cache=action: self._initialize(cache))  # type: ignore[misc]
                case EndEpoch():
                    self._oracle = None
                    self._register()
                case Shutdown():
                    self.cluster.kill(self)
                case ExecuteStep(step=step):
                    self._compute(self.cluster.step_seconds, lambda step=step: self._run(step))  # type: ignore[misc]
                case ReleaseSlots():
                    assert self._oracle is not None
                    self._oracle.receive(encode(action))
                case None:
                    pass
                case _:
                    raise AssertionError(f"{self.name} was made to {action}")

    def _compute(self, seconds: float, then: Callable[[], None]) -> None:
        self._busy = True

        def done() -> None:
            self._busy = False
            if not self.stuck:
                then()
                self._work()

        self._later(seconds * (0.5 + self.cluster.rng.random()), done)

    def _register(self) -> None:
        self._registrations += 1
        t = self.traits
        self.cluster.on_message(
            self,
            Register(
                t.backend, "m", self.name, 1, t.model_hash, t.dtype, t.sizes, 4, f"{self.name}:{self._registrations}",
                self.session.epoch, self.shard,
            ),
        )  # fmt: skip

    def _load(self) -> None:
        self.cluster.on_message(self, LoadProgress("weights", 0.5))
        self._compute(self.traits.load_seconds / 2, self._join)

    def _join(self) -> None:
        if self.traits.fails_to_load:
            self.cluster.on_message(self, LoadFailed("out of memory"))
            self.cluster.kill(self)
            return
        self._together("join", 0, self._loaded)

    def _loaded(self) -> None:
        assert self.assignment is not None
        self.shard = self.assignment.shard
        t, epoch = self.traits, self.assignment.epoch
        self.cluster.on_message(self, Loaded(t.model_hash, VOCAB, 96, 64, t.num_blocks, True, epoch))
        self.session.loaded()

    def _initialize(self, cache: InitializeCache) -> None:
        a = self.assignment
        assert a is not None
        limits = Limits(
            a.num_slots // 2, a.max_num_batched_tokens, cache.max_model_len, cache.num_blocks, a.block_size,
            stages=a.pipeline_parallel_size,
        )  # fmt: skip
        self._oracle = OracleWorker(limits, VOCAB, a.epoch)
        self._oracle.confirmed = 1 << 60  # the scheduler's knowledge is checked where it plans
        self._together("canary", 0, self._ready)

    def _ready(self) -> None:
        self.cluster.on_message(self, Ready(self.session.epoch))
        self.session.ready()

    def _run(self, step: SchedulerOutput) -> None:
        def computed() -> None:
            assert self._oracle is not None
            assert self.assignment is not None
            for result in self._oracle.receive(encode(step)):
                if self.assignment.rank == self.assignment.output_rank:
                    self.cluster.on_result(self, result)

        self._together("step", step.step_id, computed)

    # -- with other ranks ----------------------------------------------------------------------------------------

    def _together(self, operation: str, step: int, then: Callable[[], None]) -> None:
        epoch = self.session.epoch
        assert self.assignment is not None
        if self.assignment.world_size == 1:
            then()
            return
        self.waits_for, self._then = (epoch, operation, step), then
        if epoch <= self._ended:
            self._lose_ranks("the epoch has ended")
        else:
            self.cluster.meet(self)

    def met(self, meeting: Meeting) -> None:
        """All ranks have reached the operation."""
        if self.waits_for == meeting:
            self.waits_for = None
            self._then()
            self._work()

    def miss(self, meeting: Meeting) -> None:
        """The operation failed, or timed out."""
        if self.waits_for == meeting and not self.stuck:
            self._lose_ranks("no answer")

    def _lose_ranks(self, reason: str) -> None:
        self.waits_for = None
        self.session.ranks_lost()
        self.cluster.on_message(self, RankLost(self.session.epoch, reason))
        self._work()
