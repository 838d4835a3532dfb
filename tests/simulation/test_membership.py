"""Workers register, die, hang, stop for a while, fail to load, are refused and come back, at random moments.

Each action of the group is checked (see `SimulatedCluster`). When the faults have stopped, the group serves again
within bounded virtual time, and every stream has each of its tokens once.
"""

import os
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from protocol.membership import Assignment
from protocol.requests import FinishReason
from services.config import SchedulerConfig
from services.scheduler.core.limits import Limits
from services.scheduler.membership import Started, epoch, group, timeouts
from services.scheduler.membership.epoch import Epoch
from services.scheduler.membership.formation import Formation, GroupSize
from services.scheduler.membership.losses import MAX_FUTILE_EPOCHS, PROVEN_AFTER
from services.scheduler.membership.member_states import (
    IN_EPOCH,
    MEMBER_TABLE,
    MemberAction,
    MemberEvent,
    MemberState,
)
from services.scheduler.membership.roster import Roster
from services.scheduler.membership.step_watch import StepWatch
from services.scheduler.membership.timeouts import ASSIGN_TIMEOUT, LOAD_STALL, RETURN_TIMEOUT
from services.scheduler.policies import BalancedPolicy, BatchingPolicy, ChunkedPolicy
from services.worker.session import Session
from tests.simulation.cluster import RESULTS, SimulatedCluster
from tests.simulation.simulated_worker import VOCAB, SimulatedWorker, WorkerTraits
from tests.simulation.world import World, params

SOAK = os.environ.get("RUNAHEAD_SOAK") == "1"
SEEDS, CHUNK = (5_000, 100) if SOAK else (20, 20)
SECOND_KILL, QUIET = 2.0, 10.0
LAST_FAULT = 60.0
FAULTS_END = LAST_FAULT + SECOND_KILL


def settings(**config: object) -> SchedulerConfig:
    base = {
        "settle_seconds": 2.0,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "step_timeout_seconds": 10.0,
        "recovery_timeout_seconds": 1e6,
    }
    return SchedulerConfig.model_validate(base | config)


def configure(rng: Random) -> SchedulerConfig:
    return settings(
        tensor_parallel_size=rng.choice((1, 2, 4, "auto", "auto")),
        pipeline_parallel_size=rng.choice((1, 1, 2)),
        max_spare_workers=rng.choice((1, 2, 8)),
    )


class Faults:
    """Random faults until FAULTS_END, in virtual seconds."""

    def __init__(self, cluster: SimulatedCluster, rng: Random) -> None:
        self.cluster, self.rng = cluster, rng
        tp = cluster.config.tensor_parallel_size
        needed = (rng.choice((1, 2, 4)) if tp == "auto" else tp) * cluster.config.pipeline_parallel_size
        self.start_at(0.0, self.traits())
        for _ in range(needed - 1 + rng.choice((0, 0, 1, 2))):
            self.start_at(rng.choice((0.0, 0.5, 4.0)), self.traits())
        for _ in range(rng.randint(1, 8)):
            cluster.after(rng.uniform(1.0, LAST_FAULT), self.strike)

    def traits(self, **changes: object) -> WorkerTraits:
        base = {"num_blocks": self.rng.choice((24, 32, 64)), "load_seconds": self.rng.choice((0.1, 1.0, 5.0))}
        return WorkerTraits(**(base | changes))  # type: ignore[arg-type]

    def start_at(self, seconds: float, traits: WorkerTraits) -> None:
        self.cluster.after(seconds, lambda: self.cluster.start(traits) and None)

    def victim(self) -> SimulatedWorker | None:
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
                cluster.start(self.traits())
            case "wrong":
                wrong = rng.choice(({"model_hash": "other"}, {"dtype": "bfloat16"}, {"backend": "native"}))
                if len(cluster.group.roster):
                    cluster.start(self.traits(**wrong))
            case "bad memory":
                cluster.start(self.traits(fails_to_load=True))
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


def recovery(cluster: SimulatedCluster) -> float:
    """Virtual seconds within which a group of healthy workers must serve: the longest stop, return and load in turn.
    Each worker that hangs, also a spare, may hold up an epoch of its own."""
    return 200.0 + LOAD_STALL * max(1, cluster.coverage["faults: hang"])


def formed_well(cluster: SimulatedCluster) -> bool:
    """Return whether the ranks in effect are sound, all workers registered, and under `auto` the size the largest."""
    config, size = cluster.config, cluster.group.size
    if not (cluster.sound() and cluster.complete()) or size is None:
        return False
    num_workers = len(cluster.group.roster)
    largest = max((n for n in (1, 2, 4) if n * config.pipeline_parallel_size <= num_workers), default=0)
    return size.tensor_parallel == (
        largest if config.tensor_parallel_size == "auto" else config.tensor_parallel_size
    )


def play(seed: int, trace: Callable[[str], None] | None = None) -> SimulatedCluster:
    """The group without an engine: a step ends when all ranks are well."""
    rng = Random(f"group/{seed}")
    cluster = SimulatedCluster(configure(rng), seed, trace)
    cluster.run_steps()
    Faults(cluster, rng)
    cluster.run(FAULTS_END)
    if cluster.run(recovery(cluster), until=lambda: formed_well(cluster)):
        number, leaves = cluster.group.epoch, any(w.alive and w.stuck for w in cluster.workers.values())
        cluster.run(QUIET)
        assert leaves or cluster.group.epoch == number, "a group of sound workers was disturbed"
        cluster.coverage["settled"] += 1
    elif not cluster.failed:
        raise AssertionError(f"liveness: {cluster.group.status}, {list(cluster.group.roster)}")
    cluster.coverage["gave up"] += cluster.failed
    return cluster


class ServedWorld(World):
    """The engine and its clients, with the ranks of the epoch in effect as its workers."""

    def __init__(
        self, cluster: SimulatedCluster, limits: Limits, depth: int, policy: BatchingPolicy, epoch: int
    ) -> None:
        super().__init__(limits, depth, VOCAB, policy=policy, epoch=epoch)
        self.cluster = cluster

    def _on_sent(self, frame: bytes) -> None:
        self.cluster.broadcast(frame)

    def pump(self) -> None:
        if not self.lost:
            self.dispatch()
            while self.pipeline.busy:  # the ranks take their own time
                self.tick()

    def on_worker_result(self, frame: bytes) -> None:
        result = RESULTS.decode(frame)
        if self.lost or result.epoch != self.epoch.number:
            self.coverage["late results of lost workers"] += 1
            self.expected_stale += 1
            self.engine.on_result(result)
            assert self.engine.store.counters["stale_messages_total"] == self.expected_stale, (
                "a late result was not counted"
            )
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
        cluster: SimulatedCluster | None = None,
        faults: bool = True,
    ) -> None:
        self.rng = rng = Random(f"served/{seed}")
        self.cluster = cluster or SimulatedCluster(configure(rng), seed, trace)
        self.cluster.started, self.cluster.ended = self._on_started, self._on_ended
        self.cluster.result = self._on_result
        self.cluster.step_seconds = rng.choice((0.02, 0.3))
        self.world: ServedWorld | None = None
        self.num_sent = 0
        self.num_requests = rng.randint(6, 20)
        if faults:
            Faults(self.cluster, rng)
        self._send_request()

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

    def _on_result(self, frame: bytes) -> None:
        if self.world is not None:
            self.world.on_worker_result(frame)

    def _send_request(self) -> None:
        rng, world = self.rng, self.world
        if world is not None and self.num_sent < self.num_requests:
            self.num_sent += 1
            length = rng.randint(1, 40)
            world.add([rng.randrange(VOCAB) for _ in range(length)], params(rng.randint(1, 40), eos=False))
            if rng.random() < 0.1:
                world.abort(rng.choice(world.streams))
            world.pump()
            world.publish()
        if self.num_sent < self.num_requests:
            self.cluster.after(rng.choice((0.01, 1.0, 12.0)) if world else 0.5, self._send_request)

    def answered(self) -> bool:
        world = self.world
        return (
            world is not None
            and self.num_sent == self.num_requests
            and not world.lost
            and all(s.finish is not None or s.aborted for s in world.streams)
            and not len(world.engine.queue)
        )

    def run(self) -> None:
        cluster = self.cluster
        cluster.run(FAULTS_END)
        done = cluster.run(200.0 + recovery(cluster), until=self.answered)
        cluster.coverage["gave up"] += cluster.failed
        if cluster.failed:
            return
        assert done, f"liveness: {cluster.group.status}, {list(cluster.group.roster)}"
        assert self.world is not None
        self.world.check_drained()
        cluster.run(1.0)
        cluster.coverage["answered"] += sum(
            s.finish is not None and s.finish.reason is not FinishReason.ERROR for s in self.world.streams
        )
        cluster.coverage += self.world.coverage


def serve(seed: int, trace: Callable[[str], None] | None = None) -> SimulatedCluster:
    deployment = Deployment(seed, trace)
    deployment.run()
    return deployment.cluster


def happened(run: Callable[[int], SimulatedCluster], seeds: range) -> Counter[str]:
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
    *(f"ended: {phase}" for phase in ("loading", "serving", "ranks_lost")),
    *(f"epochs of {size}" for size in ("1 x 1", "2 x 1", "4 x 1", "1 x 2", "2 x 2")),
    *(f"late messages of a worker that is {state}" for state in ("unknown", "returning", "spare")),
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


def cluster_of(**config: object) -> SimulatedCluster:
    cluster = SimulatedCluster(settings(**config), 0)
    cluster.run_steps()
    return cluster


def ranks_of(cluster: SimulatedCluster) -> list[SimulatedWorker]:
    """The workers of the epoch in effect, in the order of their ranks."""
    assert cluster.effective is not None
    return [cluster.workers[peer] for peer in cluster.effective.peers]


def serving(cluster: SimulatedCluster, count: int) -> list[SimulatedWorker]:
    workers = [cluster.start(WorkerTraits()) for _ in range(count)]
    assert cluster.run(30.0, until=cluster.sound)
    return workers


def test_a_spare_takes_the_place_of_a_dead_rank() -> None:
    cluster = cluster_of(tensor_parallel_size=2)
    cluster.restarts = False
    serving(cluster, 3)
    dead = ranks_of(cluster)[1]
    cluster.kill(dead)
    assert cluster.run(5.0, until=lambda: cluster.group.epoch == 2 and cluster.sound())
    assert dead not in ranks_of(cluster)


def test_a_rank_that_stopped_for_long_comes_back_as_a_spare() -> None:
    cluster = cluster_of(tensor_parallel_size=2)
    serving(cluster, 3)
    stopped = ranks_of(cluster)[0]
    stopped.stop()
    assert cluster.run(40.0, until=lambda: cluster.group.epoch == 2 and cluster.sound())
    stopped.go_on()
    cluster.run(10.0)
    assert cluster.group.epoch == 2, "its return does not disturb the group"
    assert stopped.session.phase.name == "REGISTERED"
    assert stopped.peer in cluster.group.roster


def test_a_rank_that_hangs_is_given_up() -> None:
    cluster = cluster_of(tensor_parallel_size=2)
    cluster.restarts = False
    serving(cluster, 3)
    hung = ranks_of(cluster)[1]
    hung.hang()
    assert cluster.run(10.0 + RETURN_TIMEOUT, until=lambda: cluster.group.epoch == 2 and cluster.sound())
    assert cluster.run(20.0, until=lambda: not hung.alive)


def test_a_spare_that_hangs_holds_up_the_recovery_for_seconds_only() -> None:
    cluster = cluster_of(tensor_parallel_size=2)
    cluster.restarts = False
    workers = serving(cluster, 4)
    spares = [worker for worker in workers if worker not in ranks_of(cluster)]
    spares[0].hang()
    cluster.kill(ranks_of(cluster)[0])
    assert cluster.run(ASSIGN_TIMEOUT + 10.0, until=lambda: cluster.group.epoch == 3 and cluster.sound())
    assert spares[1] in ranks_of(cluster)


def test_a_rank_that_hangs_while_it_loads_does_not_hold_up_the_spare() -> None:
    cluster = cluster_of(tensor_parallel_size=1)
    cluster.restarts = False
    hung = cluster.start(WorkerTraits())
    cluster.run(0.1)
    hung.hang()
    cluster.start(WorkerTraits())
    assert cluster.run(LOAD_STALL + RETURN_TIMEOUT + 5.0, until=cluster.sound)


def test_late_results_of_a_stopped_rank_are_dropped() -> None:
    deployment = Deployment(0, cluster=SimulatedCluster(settings(tensor_parallel_size=1), 0), faults=False)
    cluster = deployment.cluster
    cluster.step_seconds = 0.3
    for _ in range(2):
        cluster.start(WorkerTraits())
    assert cluster.run(
        60.0, until=lambda: deployment.world is not None and len(deployment.world.engine.queue) == 2
    )
    world = deployment.world
    assert world is not None
    stopped = ranks_of(cluster)[0]
    stopped.stop()
    assert cluster.run(30.0, until=lambda: cluster.group.epoch == 2 and cluster.sound())
    stopped.go_on()
    deployment.run()
    assert world.coverage["late results of lost workers"] > 0
    assert all(s.tokens == s.answer.tokens for s in world.streams if not s.aborted)


def test_auto_grows_and_shrinks_with_its_workers() -> None:
    cluster = cluster_of(tensor_parallel_size="auto")
    cluster.restarts = False
    workers = serving(cluster, 1)
    sizes = [cluster.group.size]
    for change in (1, 1, 1, -1, -1, -1):
        if change > 0:
            workers.append(cluster.start(WorkerTraits()))
        else:
            cluster.kill(workers.pop())
        cluster.run(30.0)
        assert formed_well(cluster)
        sizes.append(cluster.group.size)
    assert sizes == [GroupSize(tensor_parallel, 1) for tensor_parallel in (1, 2, 2, 4, 2, 2, 1)]


def test_an_idle_group_may_lose_workers_as_often_as_it_takes() -> None:
    """An epoch is futile if it ends before it served, not if there was no request."""
    cluster = SimulatedCluster(settings(tensor_parallel_size=1), 0)
    serving(cluster, 1)
    for _ in range(2 * MAX_FUTILE_EPOCHS):
        cluster.run(PROVEN_AFTER)
        cluster.kill(ranks_of(cluster)[0])
        assert cluster.run(30.0, until=cluster.sound)
    for _ in range(MAX_FUTILE_EPOCHS - 2):
        cluster.kill(ranks_of(cluster)[0])
        assert cluster.run(30.0, until=cluster.sound)
    cluster.kill(ranks_of(cluster)[0])
    cluster.run(30.0)
    assert cluster.failed, "workers that die at once each time are not tried for ever"


# -- the simulator can fail --------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def a_lost_rank_does_not_end_its_epoch(patch: Patch) -> None:
    for state in IN_EPOCH:
        patch.setitem(MEMBER_TABLE, (state, MemberEvent.LOST), (MemberState.UNKNOWN, (MemberAction.LEAVE,)))


def late_messages_of_an_old_epoch_are_refused(patch: Patch) -> None:
    for event in (MemberEvent.PROGRESS, MemberEvent.LOADED, MemberEvent.READY, MemberEvent.RANK_LOST):
        patch.delitem(MEMBER_TABLE, (MemberState.RETURNING, event))


def silence_is_not_noticed(patch: Patch) -> None:
    patch.setattr(timeouts, "patience", lambda member, heartbeat_timeout: 1e9)


def hung_ranks_are_waited_for(patch: Patch) -> None:
    patch.setattr(StepWatch, "overdue", lambda self, now: None)


def one_rank_for_all(patch: Patch) -> None:
    make = epoch.make_assignment
    patch.setattr(
        epoch,
        "make_assignment",
        lambda config, size, number, rank, rendezvous: make(config, size, number, 0, rendezvous),
    )


def the_rendezvous_of_the_last_rank(patch: Patch) -> None:
    make, assign = epoch.make_assignment, epoch.assign_ranks
    last = [""]

    def assign_ranks(spares: Any, size: Any) -> Any:
        ranks = assign(spares, size)
        last[0] = ranks[-1].register.rendezvous
        return ranks

    patch.setattr(epoch, "assign_ranks", assign_ranks)
    patch.setattr(
        epoch,
        "make_assignment",
        lambda config, size, number, rank, rendezvous: make(config, size, number, rank, last[0]),
    )


def serves_when_the_first_rank_is_ready(patch: Patch) -> None:
    all_are = Epoch.all_are
    patch.setattr(
        Epoch,
        "all_are",
        lambda self, state: state is MemberState.READY or all_are(self, state),
    )


def the_most_blocks_of_any_rank(patch: Patch) -> None:
    fit = epoch.fit
    patch.setattr(
        epoch, "fit", lambda config, loaded: fit(config, [max(loaded, key=lambda rank: rank.num_blocks)])
    )


def any_model_will_do(patch: Patch) -> None:
    patch.setattr(group, "objection", lambda register, model, num_others, config: None)


def auto_takes_the_smallest_size(patch: Patch) -> None:
    best_size = Formation.best_size

    def smallest(self: Formation, members: Any) -> GroupSize | None:
        size = best_size(self, members)
        return size if size is None or not self.is_auto else GroupSize(1, size.pipeline_parallel)

    patch.setattr(Formation, "best_size", smallest)


def workers_that_come_back_are_no_spares(patch: Patch) -> None:
    spares = Roster.spares.fget
    assert spares is not None
    patch.setattr(Roster, "spares", property(lambda self: [m for m in spares(self) if not m.register.epoch]))


def ranks_are_not_sent_the_end_of_their_epoch(patch: Patch) -> None:
    end = Epoch.end
    patch.setattr(Epoch, "end", lambda self, reason, now: end(self, reason, now)[:0])


def step_ids_go_on_counting(patch: Patch) -> None:
    on = Session.on

    def broken(self: Session, message: Any) -> Any:
        last_step = self.last_step
        action = on(self, message)
        if isinstance(action, Assignment):
            self.last_step = last_step
        return action

    patch.setattr(Session, "on", broken)


FAULTS: list[Callable[[Patch], None]] = [
    a_lost_rank_does_not_end_its_epoch,
    late_messages_of_an_old_epoch_are_refused,
    silence_is_not_noticed,
    hung_ranks_are_waited_for,
    one_rank_for_all,
    the_rendezvous_of_the_last_rank,
    serves_when_the_first_rank_is_ready,
    the_most_blocks_of_any_rank,
    any_model_will_do,
    auto_takes_the_smallest_size,
    workers_that_come_back_are_no_spares,
    ranks_are_not_sent_the_end_of_their_epoch,
    step_ids_go_on_counting,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_caught(fault: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in range(60):
        for run in (play, serve):
            try:
                run(seed)
            except Exception:
                return
    pytest.fail(f"60 seeds did not notice: {fault.__name__}")
