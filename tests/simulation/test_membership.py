"""Workers register, die, hang, stop for a while, fail to load, are refused and come back, at random moments.

The group is checked with each of its actions (see `Cluster`); at the end, when faults have stopped, it serves again
within bounded virtual time, and every stream has its tokens, each once.
"""

import os
from collections import Counter
from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any

import pytest

from protocol.membership import Assignment
from protocol.requests import FinishReason
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.membership import group as membership
from services.scheduler.membership.group import (
    LOAD_STALL,
    MAX_FUTILE_EPOCHS,
    PROVEN_AFTER,
    RETURN_TIMEOUT,
    TAKE_TIMEOUT,
    Send,
    Started,
    State,
    WorkerGroup,
)
from services.scheduler.policies import BalancedPolicy, BatchingPolicy, ChunkedPolicy
from services.worker.session import Session
from tests.simulation.cluster import _RESULTS, VOCAB, Cluster, Nature, Worker
from tests.simulation.world import World, params

SOAK = os.environ.get("RUNAHEAD_SOAK") == "1"
SEEDS, CHUNK = (5_000, 100) if SOAK else (60, 20)
SECOND_KILL, QUIET = 2.0, 10.0
LAST_FAULT = 60.0
FAULTS_END = LAST_FAULT + SECOND_KILL


def settings(**config: object) -> SchedulerConfig:
    base = {"settle_seconds": 2.0, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    return SchedulerConfig.model_validate(base | config)


def configure(rng: Random) -> SchedulerConfig:
    return settings(
        tensor_parallel_size=rng.choice((1, 2, 4, "auto", "auto")),
        pipeline_parallel_size=rng.choice((1, 1, 2)),
        max_spare_workers=rng.choice((1, 2, 8)),
    )


class Faults:
    """What goes wrong until FAULTS_END, all in virtual seconds."""

    def __init__(self, cluster: Cluster, rng: Random) -> None:
        self.cluster, self.rng = cluster, rng
        tp = cluster.config.tensor_parallel_size
        needed = (rng.choice((1, 2, 4)) if tp == "auto" else tp) * cluster.config.pipeline_parallel_size
        self.start_at(0.0, self.nature())
        for _ in range(needed - 1 + rng.choice((0, 0, 1, 2))):
            self.start_at(rng.choice((0.0, 0.5, 4.0)), self.nature())
        for _ in range(rng.randint(1, 8)):
            cluster.after(rng.uniform(1.0, LAST_FAULT), self.strike)

    def nature(self, **changes: object) -> Nature:
        base = {"num_blocks": self.rng.choice((24, 32, 64)), "load_seconds": self.rng.choice((0.1, 1.0, 5.0))}
        return Nature(**(base | changes))  # type: ignore[arg-type]

    def start_at(self, seconds: float, nature: Nature) -> None:
        self.cluster.after(seconds, lambda: self.cluster.start(nature) and None)

    def victim(self) -> Worker | None:
        alive = [w for w in self.cluster.workers.values() if w.alive]
        return self.rng.choice(alive) if alive else None

    def strike(self) -> None:
        rng, cluster, victim = self.rng, self.cluster, self.victim()
        kinds = (
            "kill",
            "kill",
            "kill two",
            "stop",
            "stop",
            "hang",
            "one more",
            "one more",
            "wrong",
            "bad memory",
        )
        kind = rng.choice(kinds)
        cluster.log("fault", kind, victim and victim.name)
        cluster.coverage[f"faults: {kind}"] += 1
        match kind:
            case "one more":
                cluster.start(self.nature())
            case "wrong":
                wrong = rng.choice(({"model_hash": "other"}, {"dtype": "bfloat16"}, {"backend": "native"}))
                if cluster.group.members:
                    cluster.start(self.nature(**wrong))
            case "bad memory":
                cluster.start(self.nature(fails_to_load=True))
            case _ if victim is None:
                pass
            case "kill" | "kill two":
                cluster.kill(victim)
                other = self.victim()
                if kind == "kill two" and other is not None:
                    cluster.after(rng.choice((0.0, 0.3, SECOND_KILL)), lambda: cluster.kill(other))
            case "stop":
                victim.stop()
                cluster.after(rng.choice((1.0, 4.0, 7.0, 20.0, 40.0)), victim.go_on)
            case "hang":
                victim.hang()


def recovery(cluster: Cluster) -> float:
    """Virtual seconds in which a group of healthy workers must serve: the longest stop, return and load in turn. Each
    that hangs, spares too, may hold up an epoch of its own."""
    return 200.0 + LOAD_STALL * max(1, cluster.coverage["faults: hang"])


def formed_well(cluster: Cluster) -> bool:
    """Whether the ranks in effect are sound, nobody is forgotten, and under auto they are as many as can be."""
    config, group = cluster.config, cluster.group
    if not (cluster.sound() and cluster.complete()):
        return False
    most = max(
        (size for size in (1, 2, 4) if size * config.pipeline_parallel_size <= len(group.members)), default=0
    )
    return group._size[0] == (most if config.tensor_parallel_size == "auto" else config.tensor_parallel_size)


def play(seed: int, trace: Callable[[str], None] | None = None) -> Cluster:
    """The group alone: steps are done whenever all ranks are well."""
    rng = Random(f"group/{seed}")
    cluster = Cluster(configure(rng), seed, trace)

    def step() -> None:
        if cluster.sound():
            cluster.step_done()
        cluster.after(0.5, step)

    step()
    Faults(cluster, rng)
    cluster.run(FAULTS_END)
    if cluster.run(recovery(cluster), until=lambda: formed_well(cluster)):
        epoch, leaves = cluster.group.epoch, any(w.alive and w.stuck for w in cluster.workers.values())
        cluster.run(QUIET)
        assert leaves or cluster.group.epoch == epoch, "a group of sound workers was disturbed"
        cluster.coverage["settled"] += 1
    elif cluster.failed is None:
        raise AssertionError(f"liveness: {cluster.group.detail}, {cluster.group.members}")
    cluster.coverage["gave up"] += cluster.failed is not None
    return cluster


class ServedWorld(World):
    """The engine and its clients; what it sends goes to the ranks of the epoch, whose results come back."""

    def __init__(
        self, cluster: Cluster, limits: Limits, depth: int, policy: BatchingPolicy, epoch: int
    ) -> None:
        super().__init__(limits, depth, VOCAB, policy=policy, epoch=epoch)
        self.cluster = cluster

    def _on_sent(self, frame: bytes) -> None:
        if len(self.engine.queue) <= 1:
            self.cluster.awaits_step()
        self.cluster.broadcast(frame)

    def pump(self) -> None:
        if not self.lost:
            self.dispatch()
            while self.pipeline.busy:  # the ranks take their own time
                self.tick()

    def on_worker_result(self, frame: bytes) -> None:
        result = _RESULTS.decode(frame)
        if self.lost or result.epoch != self.scheduler.epoch:
            self.coverage["late results of lost workers"] += 1
            self.expected_stale += 1
            self.engine.on_result(result)
            assert self.engine.stale_results == self.expected_stale, "a late result was not counted"
            return
        assert self.pending[result.step_id] == frame, "the output rank computed something else"
        self.complete(list(self.pending).index(result.step_id))
        self.publish()
        self.pump()


class Deployment:
    """Clients, engine, group and workers together."""

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        cluster: Cluster | None = None,
        faults: bool = True,
    ) -> None:
        self.rng = rng = Random(f"served/{seed}")
        self.cluster = cluster or Cluster(configure(rng), seed, trace)
        self.cluster.on_started, self.cluster.on_ended = self._on_started, self._on_ended
        self.cluster.on_result = lambda frame: self.world and self.world.on_worker_result(frame)  # type: ignore[assignment]
        self.cluster.serves = lambda: self.world is not None and len(self.world.engine.queue) > 0
        self.cluster.step_seconds = rng.choice((0.02, 0.3))
        self.world: ServedWorld | None = None
        self.asked = 0
        self.wanted = rng.randint(6, 20)
        if faults:
            Faults(self.cluster, rng)
        self._ask()

    def _on_started(self, started: Started) -> None:
        policy: BatchingPolicy = BalancedPolicy() if self.rng.random() < 0.5 else ChunkedPolicy()
        if self.world is None:
            depth = self.cluster.config.depth
            self.world = ServedWorld(self.cluster, started.limits, depth, policy, started.epoch)
        else:
            self.world.start_epoch(started.limits, policy, started.epoch)
        self.world.pump()

    def _on_ended(self) -> None:
        assert self.world is not None
        self.cluster.coverage["streams carried over"] += sum(s.open for s in self.world.streams)
        self.world.end_epoch()

    def _ask(self) -> None:
        rng, world = self.rng, self.world
        if world is not None and self.asked < self.wanted:
            self.asked += 1
            length = rng.randint(1, 40)
            world.add([rng.randrange(VOCAB) for _ in range(length)], params(rng.randint(1, 40), eos=False))
            if rng.random() < 0.1:
                world.abort(rng.choice(world.streams))
            world.pump()
            world.publish()
        if self.asked < self.wanted:
            self.cluster.after(rng.choice((0.01, 1.0, 12.0)) if world else 0.5, self._ask)

    def answered(self) -> bool:
        world = self.world
        return (
            world is not None
            and self.asked == self.wanted
            and not world.lost
            and all(s.finish is not None or s.aborted for s in world.streams)
            and not len(world.engine.queue)
        )

    def run(self) -> None:
        cluster = self.cluster
        cluster.run(FAULTS_END)
        done = cluster.run(200.0 + recovery(cluster), until=self.answered)
        cluster.coverage["gave up"] += cluster.failed is not None
        if cluster.failed is not None:
            return
        assert done, f"liveness: {cluster.group.detail}, {cluster.group.members}"
        assert self.world is not None
        self.world.check_drained()
        cluster.run(1.0)
        cluster.coverage["answered"] += sum(
            s.finish is not None and s.finish.reason is not FinishReason.ERROR for s in self.world.streams
        )
        cluster.coverage += self.world.coverage


def serve(seed: int, trace: Callable[[str], None] | None = None) -> Cluster:
    deployment = Deployment(seed, trace)
    deployment.run()
    return deployment.cluster


def happened(run: Callable[[int], Cluster], seeds: range) -> Counter[str]:
    counted: Counter[str] = Counter()
    for seed in seeds:
        try:
            counted += run(seed).coverage
        except Exception as error:
            pytest.fail(f"{run.__name__}({seed}): {type(error).__name__}: {error}")
    return counted


GROUP_MUST = [
    *(f"faults: {kind}" for kind in ("kill", "kill two", "stop", "hang", "one more", "wrong", "bad memory")),
    *(f"deaths: {phase}" for phase in ("registered", "loading", "serving")),
    *(f"ended: {phase}" for phase in ("loading", "serving", "alone")),
    *(f"epochs of {size}" for size in ("1 x 1", "2 x 1", "4 x 1", "1 x 2", "2 x 2")),
    "refused: other model",
    "refused: too many",
    "hangs noticed",
    "weights kept",
    "recoveries",
    "settled",
]


@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize("first", range(0, 2 * SEEDS, 2 * CHUNK))
def test_a_group_recovers_from_any_faults(first: int) -> None:
    counted = happened(play, range(first, first + 2 * CHUNK))
    assert [name for name in GROUP_MUST if not counted[name]] == []
    assert counted["gave up"] < CHUNK / 4


@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_stream_has_its_tokens_whatever_happens_to_the_workers(first: int) -> None:
    counted = happened(serve, range(first, first + CHUNK))
    must = ["streams carried over", "answered", "resumed in another epoch"]
    assert [name for name in (*must, "epochs: ended in flight") if not counted[name]] == []
    assert counted["gave up"] < CHUNK / 4


# -- by hand -----------------------------------------------------------------------------------------------------------


def of(**config: object) -> Cluster:
    cluster = Cluster(settings(**config), 0)

    def step() -> None:
        if cluster.sound():
            cluster.step_done()
        cluster.after(0.5, step)

    step()
    return cluster


def serving(cluster: Cluster, count: int) -> list[Worker]:
    workers = [cluster.start(Nature()) for _ in range(count)]
    assert cluster.run(30.0, until=cluster.sound)
    return workers


def test_a_spare_takes_the_place_of_a_dead_rank() -> None:
    cluster = of(tensor_parallel_size=2)
    cluster.restarts = False
    first, second, spare = serving(cluster, 3)
    dead = next(w for w in (first, second, spare) if w.peer == cluster.effective.peers[1])  # type: ignore[union-attr]
    cluster.kill(dead)
    assert cluster.run(5.0, until=lambda: cluster.group.epoch == 2 and cluster.sound())
    assert dead.peer not in cluster.effective.peers  # type: ignore[union-attr]


def test_a_rank_that_stopped_for_long_comes_back_as_a_spare() -> None:
    cluster = of(tensor_parallel_size=2)
    serving(cluster, 3)
    stopped = cluster.workers[cluster.effective.peers[0]]  # type: ignore[union-attr]
    stopped.stop()
    assert cluster.run(40.0, until=lambda: cluster.group.epoch == 2 and cluster.sound())
    stopped.go_on()
    cluster.run(10.0)
    assert cluster.group.epoch == 2, "its return disturbs nobody"
    assert stopped.session.phase.name == "REGISTERED"
    assert stopped.peer in cluster.group.members


def test_a_rank_that_hangs_is_given_up() -> None:
    cluster = of(tensor_parallel_size=2)
    cluster.restarts = False
    serving(cluster, 3)
    hung = cluster.workers[cluster.effective.peers[1]]  # type: ignore[union-attr]
    hung.hang()
    assert cluster.run(10.0 + RETURN_TIMEOUT, until=lambda: cluster.group.epoch == 2 and cluster.sound())
    assert cluster.run(20.0, until=lambda: not hung.alive)


def test_a_spare_that_hangs_holds_up_the_recovery_for_seconds_only() -> None:
    cluster = of(tensor_parallel_size=2)
    cluster.restarts = False
    workers = serving(cluster, 4)
    spares = [w for w in workers if w.peer not in cluster.effective.peers]  # type: ignore[union-attr]
    spares[0].hang()
    cluster.kill(cluster.workers[cluster.effective.peers[0]])  # type: ignore[union-attr]
    assert cluster.run(TAKE_TIMEOUT + 10.0, until=lambda: cluster.group.epoch == 3 and cluster.sound())
    assert spares[1].peer in cluster.effective.peers  # type: ignore[union-attr]


def test_a_rank_that_hangs_while_it_loads_does_not_hold_up_the_spare() -> None:
    cluster = of(tensor_parallel_size=1)
    cluster.restarts = False
    hung = cluster.start(Nature())
    cluster.run(0.1)
    hung.hang()
    cluster.start(Nature())
    assert cluster.run(LOAD_STALL + RETURN_TIMEOUT + 5.0, until=cluster.sound)


def test_what_a_stopped_rank_computes_after_all_is_dropped() -> None:
    deployment = Deployment(0, cluster=Cluster(settings(tensor_parallel_size=1), 0), faults=False)
    cluster = deployment.cluster
    cluster.step_seconds = 0.3
    for _ in range(2):
        cluster.start(Nature())
    assert cluster.run(
        60.0, until=lambda: deployment.world is not None and len(deployment.world.engine.queue) == 2
    )
    world = deployment.world
    assert world is not None
    stopped = cluster.workers[cluster.effective.peers[0]]  # type: ignore[union-attr]
    stopped.stop()
    assert cluster.run(30.0, until=lambda: cluster.group.epoch == 2 and cluster.sound())
    stopped.go_on()
    deployment.run()
    assert world.coverage["late results of lost workers"] > 0
    assert all(s.tokens == s.answer.tokens for s in world.streams if not s.aborted)


def test_auto_grows_and_shrinks_with_its_workers() -> None:
    cluster = of(tensor_parallel_size="auto")
    cluster.restarts = False
    workers = serving(cluster, 1)
    sizes = [cluster.group._size[0]]
    for change in (1, 1, 1, -1, -1, -1):
        if change > 0:
            workers.append(cluster.start(Nature()))
        else:
            cluster.kill(workers.pop())
        cluster.run(30.0)
        assert formed_well(cluster)
        sizes.append(cluster.group._size[0])
    assert sizes == [1, 2, 2, 4, 2, 2, 1]


def test_an_idle_group_may_lose_workers_as_often_as_it_takes() -> None:
    """Futile are epochs that end before they served, not those in which nobody asked."""
    cluster = of(tensor_parallel_size=1)
    cluster.serves = lambda: False
    cluster.step_done = lambda: None  # type: ignore[method-assign]
    serving(cluster, 1)
    for _ in range(2 * MAX_FUTILE_EPOCHS):
        cluster.run(PROVEN_AFTER)
        cluster.kill(cluster.workers[cluster.effective.peers[0]])  # type: ignore[union-attr]
        assert cluster.run(30.0, until=cluster.sound)
    for _ in range(MAX_FUTILE_EPOCHS - 2):
        cluster.kill(cluster.workers[cluster.effective.peers[0]])  # type: ignore[union-attr]
        assert cluster.run(30.0, until=cluster.sound)
    cluster.kill(cluster.workers[cluster.effective.peers[0]])  # type: ignore[union-attr]
    cluster.run(30.0)
    assert cluster.failed is not None, "workers that die at once each time are not tried for ever"


# -- the simulator can fail --------------------------------------------------------------------------------------------

Fault = tuple[type | ModuleType, str, Callable[[Any], Any]]


def a_lost_member_does_not_end_its_epoch(lose: Any) -> Any:
    def broken(self: WorkerGroup, member: Any, reason: str, now: float) -> None:
        del self.members[member.peer]

    return broken


def silence_is_not_noticed(patience: Any) -> Any:
    return lambda self, member: 1e9


def who_hangs_is_waited_for(on_hang: Any) -> Any:
    return lambda self, reason, now: None


def one_rank_for_all(seat: Any) -> Any:
    return lambda self, rank, rendezvous: seat(self, 0, rendezvous)


def the_rendezvous_of_another(begin: Any) -> Any:
    def broken(self: WorkerGroup, size: Any, spares: Any, now: float) -> None:
        before = self._assignment
        self._assignment = lambda rank, _: before(rank, spares[-1].register.rendezvous)  # type: ignore[method-assign]
        begin(self, size, spares, now)
        del self._assignment  # type: ignore[method-assign]

    return broken


def serves_when_the_first_rank_is_ready(ranks: Any) -> Any:
    def broken(self: WorkerGroup, now: float) -> None:
        self._ranks()[0].state = State.READY
        for member in self._ranks():
            member.state = State.READY
        ranks(self, now)

    return broken


def the_most_blocks_of_any_rank(fit: Any) -> Any:
    return lambda config, loaded: fit(config, [max(loaded, key=lambda rank: rank.num_blocks)])


def any_model_will_do(objection: Any) -> Any:
    return lambda self, peer, register: None


def auto_takes_the_smallest_size(wanted: Any) -> Any:
    def broken(self: WorkerGroup) -> Any:
        size = wanted(self)
        return size if size is None or self.config.tensor_parallel_size != "auto" else (1, size[1])

    return broken


def spares_wait_for_the_next_register(end: Any) -> Any:
    return lambda self, now: None if self.epoch and self._served else end(self, now)


def members_are_not_told_of_the_end(end: Any) -> Any:
    def broken(self: WorkerGroup, reason: str, now: float, is_fault: bool = True) -> None:
        before = len(self._actions)
        end(self, reason, now, is_fault)
        self._actions[before:] = [a for a in self._actions[before:] if not isinstance(a, Send)]

    return broken


def steps_go_on_counting(on: Any) -> Any:
    def broken(self: Session, message: Any) -> Any:
        last_step = self.last_step
        action = on(self, message)
        if isinstance(action, Assignment):
            self.last_step = last_step
        return action

    return broken


FAULTS: list[Fault] = [
    (WorkerGroup, "_lose", a_lost_member_does_not_end_its_epoch),
    (WorkerGroup, "_patience", silence_is_not_noticed),
    (WorkerGroup, "on_hang", who_hangs_is_waited_for),
    (WorkerGroup, "_assignment", one_rank_for_all),
    (WorkerGroup, "_begin", the_rendezvous_of_another),
    (WorkerGroup, "_start_when_ready", serves_when_the_first_rank_is_ready),
    (membership, "fit", the_most_blocks_of_any_rank),
    (WorkerGroup, "_objection", any_model_will_do),
    (WorkerGroup, "_wanted", auto_takes_the_smallest_size),
    (WorkerGroup, "_form", spares_wait_for_the_next_register),
    (WorkerGroup, "_end", members_are_not_told_of_the_end),
    (Session, "on", steps_go_on_counting),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[2].__name__)
def test_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken = fault
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    for seed in range(60):
        for run in (play, serve):
            try:
                run(seed)
            except Exception:
                return
    pytest.fail(f"60 seeds did not notice: {broken.__name__}")
