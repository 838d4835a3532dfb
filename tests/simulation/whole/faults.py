"""Faults that strike a whole system at random moments, and the run of one seed.

Two kinds of runs: in an *orderly* one processes are killed, stopped and cut off, as TCP and the supervisor allow, and
no request may fail. In a *noisy* one frames are lost, repeated, reordered and damaged as well, workers hang, and faults
come in any number: a request may then end with one typed error instead.
"""

from collections import Counter
from collections.abc import Callable
from random import Random

from tests.simulation.whole.client import check_answer
from tests.simulation.whole.network import Noise
from tests.simulation.whole.system import SILENCE, Layout, System, WorkerProcess

REQUESTS_END = 8.0
FAULTS_BEGIN, FAULTS_END = 2.0, 14.0
HEAL = 20.0
BOUND = 150.0
"""Virtual seconds from the end of all faults until every request has ended."""
TYPED = {"429", "500", "503", "504"}
STEPS = (0.02, 0.1, 0.3)


def layout(rng: Random) -> Layout:
    return Layout(
        num_frontends=rng.choice((1, 2)),
        tensor_parallel=rng.choice((1, 1, 2)),
        num_spares=rng.choice((0, 0, 1)),
        depth=rng.choice((1, 2, 2, 3)),
        drafts=rng.random() < 0.25,
        num_blocks=rng.choice((20, 28, 48)),
        step_seconds=rng.choice(STEPS),
        load_seconds=rng.choice((0.1, 1.0)),
        latencies=rng.choice(((0.0002, 0.0005, 0.002), (0.001, 0.05, 0.2))),
        late_masks=rng.random() < 0.8,
        leaves_rows_out=rng.random() < 0.7,
    )


class SystemFaults:
    def __init__(self, system: System, noisy: bool) -> None:
        self.system, self.rng, self.noisy = system, system.rng, noisy
        self.losses = Counter[str]()
        """Processes lost so far; three losses without progress make a request a suspect."""
        kinds: list[Callable[[], None]] = [
            self.kill_worker,
            self.kill_scheduler,
            self.kill_frontend,
            self.stop_worker,
            self.stop_scheduler,
            self.stop_frontend,
            self.replace_scheduler,
            self.cut_worker,
            self.cut_frontend,
        ]
        if noisy:
            kinds += [self.noise, self.noise, self.noise, self.hang, self.lack_memory]
            system.expected_statuses |= {4, 5, 6, 7}
        for _ in range(self.rng.randint(1, 8 if noisy else 4)):
            system.hub.after(self.rng.uniform(FAULTS_BEGIN, FAULTS_END), self.rng.choice(kinds))
        system.hub.after(HEAL, self.heal)

    def heal(self) -> None:
        self.system.network.calm()
        self.system.network.heal()

    def _count(self, what: str, cause: str) -> bool:
        """Return whether the fault may strike. Orderly runs lose a scheduler or workers twice at most."""
        if not self.noisy and self.losses[cause] >= 2:
            return False
        self.losses[cause] += 1
        self.system.happened[what] += 1
        self.system.hub.log("fault:", what)
        return True

    def _worker(self) -> WorkerProcess | None:
        alive = [worker for worker in self.system.workers if not worker.process.stopped]
        return self.rng.choice(alive) if alive else None

    # -- kills ---------------------------------------------------------------------------------------------------

    def kill_worker(self) -> None:
        if (worker := self._worker()) is not None and self._count("workers killed", "workers"):
            worker.process.end(-9)

    def kill_scheduler(self) -> None:
        scheduler = self.system.scheduler
        if scheduler is not None and scheduler.alive and self._count("schedulers killed", "schedulers"):
            scheduler.end(-9)

    def kill_frontend(self) -> None:
        if self.system.frontends and self._count("frontends killed", "frontends"):
            self.rng.choice(self.system.frontends).process.end(-9)

    # -- stops ---------------------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        """Return how long a stop or a partition lasts: unnoticed, or beyond the limit of silence."""
        return self.rng.choice((0.1, 0.5, 1.0, 3.0, SILENCE + 1.0, 2 * SILENCE))

    def stop_worker(self) -> None:
        if (worker := self._worker()) is not None and self._count("workers stopped", "workers"):
            self._stop(worker.process)

    def stop_scheduler(self) -> None:
        scheduler = self.system.scheduler
        if scheduler is None or scheduler.stopped or not scheduler.alive:
            return
        if self._count("schedulers stopped", "schedulers"):
            self._stop(scheduler)

    def stop_frontend(self) -> None:
        if self.system.frontends and self._count("frontends stopped", "frontends"):
            self._stop(self.rng.choice(self.system.frontends).process)

    def _stop(self, process: object) -> None:
        process.stop()
        self.system.hub.after(self._seconds(), process.go_on)

    def replace_scheduler(self) -> None:
        """The scheduler is stopped, another one takes its place, and the first one wakes soon or late."""
        scheduler = self.system.scheduler
        if scheduler is None or scheduler.stopped or not scheduler.alive:
            return
        if not self._count("schedulers replaced", "schedulers"):
            return
        scheduler.stop()
        self.system.hub.after(self.rng.uniform(0.5, SILENCE), self._replace)
        self.system.hub.after(self.rng.choice((SILENCE + self.rng.uniform(0.5, 4.0), 100.0)), scheduler.go_on)

    def _replace(self) -> None:
        scheduler = self.system.scheduler
        if scheduler is not None and scheduler.stopped:
            self.system.start_scheduler()

    # -- partitions ----------------------------------------------------------------------------------------------

    def cut_worker(self) -> None:
        if (worker := self._worker()) is not None and self._count("workers cut off", "workers"):
            self._cut(worker.process.name)

    def cut_frontend(self) -> None:
        if self.system.frontends and self._count("frontends cut off", "schedulers"):
            self._cut(self.rng.choice(self.system.frontends).process.name)

    def _cut(self, name: str) -> None:
        scheduler = self.system.scheduler
        if scheduler is None:
            return
        pairs = [(name, scheduler.name), (scheduler.name, name)]
        for pair in self.rng.choice((pairs, pairs[:1], pairs[1:])):
            self.system.network.partition(*pair)
        self.system.hub.after(self._seconds(), self.system.network.heal)

    # -- beyond TCP ----------------------------------------------------------------------------------------------

    def noise(self) -> None:
        some = self.rng.choice((0.0, 0.005, 0.02, 0.1))
        draw = lambda: self.rng.choice((0.0, some))  # noqa: E731
        self.system.network.noise = Noise(draw(), draw(), draw(), draw())
        self._count("noise", "noise")

    def hang(self) -> None:
        if (worker := self._worker()) is not None and self._count("devices hung", "workers"):
            worker.device.hangs = True

    def lack_memory(self) -> None:
        if (worker := self._worker()) is not None and self._count("steps out of memory", "workers"):
            worker.device.lacks_memory = True


def play(seed: int, trace: Callable[[str], None] | None = None) -> System:
    """Run one seed. Raises: AssertionError"""
    rng = Random(seed)
    system = System(seed, layout(rng), trace)
    noisy = seed % 2 == 1
    system.hub.log("seed", seed, "noisy" if noisy else "orderly", system.layout)
    with system.libraries():
        system.start()
        for _ in range(rng.randint(3, 9)):
            system.send_later(system.draw_request(rng.uniform(0.5, REQUESTS_END)))
        faults = SystemFaults(system, noisy)
        system.hub.run(HEAL + 0.1)
        ended = system.hub.run(BOUND, lambda: system.answered and system.serving)
        assert ended, f"not serving, or open after {BOUND:g} s: {_open(system)}"
        probes = [system.draw_request(system.hub.now) for _ in system.frontends]
        for frontend, probe in zip(system.frontends, probes, strict=True):
            probe.leaves_after = None
            system.requests.append(probe)
            frontend.accept(probe)
        assert system.hub.run(60.0, lambda: system.answered and system.quiet), f"no progress: {_open(system)}"
        system.hub.run(SILENCE + 2.0)  # leases end, and broken connections are found
        assert system.hub.run(BOUND, lambda: system.quiet), "a rank that hangs is not replaced"
        check(system, noisy, {probe.name for probe in probes})
        loads = sum(worker.device.num_loads for worker in system.workers)
        if not noisy and not faults.losses["workers"]:
            assert loads == system.layout.tensor_parallel, f"weights were read {loads} times"
    return system


def _open(system: System) -> list[str]:
    return [request.name for request in system.requests if not request.outcome]


def check(system: System, noisy: bool, probes: set[str]) -> None:
    for request in system.requests:
        check_answer(request)
        allowed = {"done", "left", "broken"} | (TYPED if noisy and request.name not in probes else set())
        assert request.outcome in allowed, f"request {request.name}: {request.outcome} {request.error}"
        system.happened[f"requests {request.outcome}"] += 1
    system.check_leaks()
