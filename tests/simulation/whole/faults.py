"""Faults that strike a whole system at random moments, and the run of one seed.

Two kinds of runs: in an *orderly* one processes are killed, stopped and cut off, as TCP and the supervisor allow, and
no request may fail. In a *noisy* one frames are lost, repeated, reordered and damaged as well, workers hang, and faults
come in any number: a request may then end with one typed error instead. In both, some runs have requests that take down
the workers or the scheduler: these must be refused, and in an orderly run nobody else.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from random import Random

from services.frontend.errors import APIError
from tests.simulation.whole.client import SimulatedFrontend, check_answer
from tests.simulation.whole.hub import SimulatedProcess
from tests.simulation.whole.network import Noise, Speeds
from tests.simulation.whole.system import SILENCE, Layout, SimulatedEngine, System, WorkerProcess

REQUESTS_END = 8.0
FAULTS_BEGIN, FAULTS_END = 2.0, 10.0
HEAL = 14.0
BOUND = 250.0
"""Virtual seconds from the end of all faults until every request has ended."""
TYPED = {"429", "500", "503", "504"}
STEPS = (0.02, 0.1, 0.3)
TWO_ENGINES = 1 / 6
"""Share of the runs with two engines."""
MOST_LOSSES = 2
"""Losses of workers, and of schedulers, in an orderly run: with three, a request may be refused that did nothing."""


class Poisoned(Enum):
    """Which processes the poisonous requests of a run take down."""

    NONE = "none"
    WORKERS = "workers"
    SCHEDULERS = "schedulers"


POISONED = (Poisoned.NONE,) * 8 + (Poisoned.WORKERS, Poisoned.SCHEDULERS)


def layout(rng: Random, poisoned: Poisoned) -> Layout:
    pipeline_parallel = rng.choice((1, 1, 1, 2))
    return Layout(
        # Two suspects of two frontends may be refused together (docs/operations.md).
        num_frontends=1 if poisoned is Poisoned.SCHEDULERS else rng.choice((1, 2)),
        tensor_parallel=rng.choice((1, 1, 2)),
        pipeline_parallel=pipeline_parallel,
        num_spares=rng.choice((0, 0, 1)),
        depth=rng.choice((2, 3)) if pipeline_parallel > 1 else rng.choice((1, 2, 2, 3)),
        drafts=rng.random() < 0.25,
        num_blocks=rng.choice((20, 28, 48)),
        step_seconds=rng.choice(STEPS),
        load_seconds=rng.choice((0.1, 1.0)),
        speeds=Speeds(
            latencies=rng.choice(((0.0002, 0.0005, 0.002), (0.001, 0.05, 0.2))),
            lags=rng.choice(((0.0,), (0.0,), (0.0, 0.0, 0.3))),
            # Slower ones could make a worker with the weights miss the 3 s that a scheduler waits for it.
            connects=rng.choice(((0.001,), (0.001, 0.02), (0.001, 0.1, 0.5))),
        ),
        late_masks=rng.random() < 0.8,
        leaves_rows_out=rng.random() < 0.7,
    )


def with_second(seed: int, first: Layout, poisoned: Poisoned) -> list[Layout]:
    """Return the layouts of a seed's engines: some have a second one, whose settings differ."""
    rng = Random(f"engines of {seed}")
    if rng.random() >= TWO_ENGINES:
        return [first]
    if poisoned is not Poisoned.NONE:
        first = replace(first, num_frontends=1)  # as in `layout`: a stream that moves takes lost workers along
    names = ["num_frontends", "speeds", "has_tier", "has_keeper", "has_peers"]
    if rng.random() < 0.9:
        names.append("num_blocks")  # otherwise the context length may differ, and no stream may move
    has_peers = rng.random() < 0.5
    first_role, role = "both", rng.choice(("both", "both", "prefill"))
    if has_peers:
        first_role, role = rng.choice((("both", "both"), ("decode", "prefill"), ("prefill", "decode")))
        if rng.random() < 0.8:  # otherwise an engine has no block of the other one
            names += ["tensor_parallel", "pipeline_parallel", "depth", "drafts"]
    first = replace(first, has_peers=has_peers, role=first_role, step_tokens=rng.choice((8, 24)))
    second = replace(layout(rng, poisoned), **{name: getattr(first, name) for name in names})
    others = {
        "role": role,
        "step_tokens": rng.choice((8, 24)),
        "max_queued": rng.choice((1, 2, 128)),
        "has_grammars": rng.random() < 0.8,
    }
    if not (has_peers or first.has_tier or first.has_keeper):  # backends that serve adapters keep no blocks
        first = replace(first, max_loras=rng.choice((1, 2)))
        others |= {"max_loras": first.max_loras, "loads_adapters": rng.random() < 0.5}
    return [first, replace(second, number=1, num_spares=0, **others)]


class SystemFaults:
    def __init__(self, system: System, noisy: bool, poisoned: Poisoned) -> None:
        self.system, self.rng, self.noisy = system, system.rng, noisy
        self.losses = Counter({poisoned.value: MOST_LOSSES})
        """Processes lost so far."""
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
            self.reset_worker,
            self.reset_frontend,
        ]
        if noisy:
            kinds += [self.noise, self.noise, self.noise, self.hang, self.lack_memory]
            system.expected_statuses |= {4, 5, 6, 7}
        elif poisoned is Poisoned.WORKERS:
            # A frontend that connects again submits its requests anew, and the losses counted for them begin at zero:
            # the scheduler may give up before it has found one (docs/operations.md, "Limits").
            for kind in (self.stop_frontend, self.cut_frontend, self.reset_frontend):
                kinds.remove(kind)
        if len(system.engines) > 1:
            kinds += 2 * [self.kill_engine, self.stop_engine, self.end_scheduler, self.drain_engine, self.unlist_engine]
        if system.layout.has_peers:
            kinds += 2 * [self.cut_peers]
        for _ in range(self.rng.randint(1, 8 if noisy else 4)):
            system.hub.after(self.rng.uniform(FAULTS_BEGIN, FAULTS_END), self.rng.choice(kinds))
        system.hub.after(HEAL, self.heal)

    def heal(self) -> None:
        self.system.network.calm()
        self.system.network.heal()

    def _count(self, what: str, cause: str) -> bool:
        """Return whether the fault may strike."""
        struck = self.losses[cause]
        if len(self.system.engines) > 1 and cause in ("workers", "schedulers"):  # both count for a stream that moves
            struck = self.losses["workers"] + self.losses["schedulers"]
        if not self.noisy and struck >= MOST_LOSSES:
            return False
        self.losses[cause] += 1
        self.system.happened[what] += 1
        self.system.hub.log("fault:", what)
        return True

    def _engine(self) -> SimulatedEngine:
        engines = self.system.engines
        return self.rng.choice(engines) if len(engines) > 1 else engines[0]

    def _worker(self) -> WorkerProcess | None:
        workers = [worker for engine in self.system.engines for worker in engine.workers]
        alive = [worker for worker in workers if not worker.process.stopped]
        return self.rng.choice(alive) if alive else None

    # -- kills ---------------------------------------------------------------------------------------------------

    def kill_worker(self) -> None:
        if (worker := self._worker()) is not None and self._count("workers killed", "workers"):
            worker.process.end(-9)

    def kill_scheduler(self) -> None:
        scheduler = self._engine().scheduler
        if scheduler is not None and scheduler.alive and self._count("schedulers killed", "schedulers"):
            scheduler.end(-9)

    def kill_engine(self) -> None:
        engine = self._engine()
        if self._count("engines killed", "schedulers"):
            self.losses["weights"] += 1
            for process in engine.processes:
                process.end(-9)

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
        scheduler = self._engine().scheduler
        if scheduler is None or scheduler.stopped or not scheduler.alive:
            return
        if self._count("schedulers stopped", "schedulers"):
            self._stop(scheduler)

    def stop_engine(self) -> None:
        engine = self._engine()
        if self._count("engines stopped", "schedulers"):
            self.losses["weights"] += 1
            self._stop(*(process for process in engine.processes if not process.stopped))

    def stop_frontend(self) -> None:
        if self.system.frontends and self._count("frontends stopped", "frontends"):
            self._stop(self.rng.choice(self.system.frontends).process)

    def _stop(self, *processes: SimulatedProcess) -> None:
        seconds = self._seconds()
        for process in processes:
            process.stop()
            self.system.hub.after(seconds, process.go_on)

    def replace_scheduler(self) -> None:
        """The scheduler is stopped, another one takes its place, and the first one wakes soon or late."""
        engine = self._engine()
        scheduler = engine.scheduler
        if scheduler is None or scheduler.stopped or not scheduler.alive:
            return
        if not self._count("schedulers replaced", "schedulers"):
            return
        scheduler.stop()
        self.system.hub.after(self.rng.uniform(0.5, SILENCE), partial(self._replace, engine))
        self.system.hub.after(self.rng.choice((SILENCE + self.rng.uniform(0.5, 4.0), 100.0)), scheduler.go_on)

    def _replace(self, engine: SimulatedEngine) -> None:
        if engine.scheduler is not None and engine.scheduler.stopped:
            engine.start_scheduler()

    # -- an administrator's changes ------------------------------------------------------------------------------

    def end_scheduler(self) -> None:
        """SIGTERM: its streams end, or move, before it does."""
        engine = self._engine()
        if engine.wakeup is not None and self._count("schedulers drained", "weights"):
            engine.wakeup.put()

    def drain_engine(self) -> None:
        """One frontend drains an engine, and takes that back."""
        name = str(self._engine().layout.number)

        def drain(frontend: SimulatedFrontend, draining: bool) -> None:
            with suppress(APIError):  # it is the only one that serves
                frontend.engine.engines.drain(name, draining)

        self._change("engines drained", partial(drain, draining=True), partial(drain, draining=False))

    def unlist_engine(self) -> None:
        """The list of one frontend has an engine no longer for a while."""
        number = self._engine().layout.number

        def list_engines(frontend: SimulatedFrontend, but: int) -> None:
            addresses = [address for address in frontend.addresses if address.name != str(but)]
            frontend.engine.engines.set_addresses(addresses)

        self._change("engines unlisted", partial(list_engines, but=number), partial(list_engines, but=-1))

    def _change(
        self, what: str, begin: Callable[[SimulatedFrontend], None], end: Callable[[SimulatedFrontend], None]
    ) -> None:
        if self.system.frontends and self._count(what, what):
            frontend = self.rng.choice(self.system.frontends)
            frontend.do(partial(begin, frontend))
            self.system.hub.after(self._seconds(), partial(frontend.do, partial(end, frontend)))

    # -- partitions ----------------------------------------------------------------------------------------------

    def cut_worker(self) -> None:
        if (worker := self._worker()) is not None and self._count("workers cut off", "workers"):
            self._cut(worker.process.name, worker.engine.scheduler)

    def cut_peers(self) -> None:
        """The workers of two engines do not reach each other."""
        workers = [engine.workers[0].process for engine in self.system.engines if engine.workers]
        if len(workers) > 1 and self._count("peers cut off", "peers"):
            self._cut(workers[0].name, workers[1])

    def cut_frontend(self) -> None:
        if self.system.frontends and self._count("frontends cut off", "schedulers"):
            self._cut(self.rng.choice(self.system.frontends).process.name, self._engine().scheduler)

    def _cut(self, name: str, other: SimulatedProcess | None) -> None:
        if other is None:
            return
        pairs = [(name, other.name), (other.name, name)]
        for pair in self.rng.choice((pairs, pairs[:1], pairs[1:])):
            self.system.network.partition(*pair)
        self.system.hub.after(self._seconds(), self.system.network.heal)

    # -- resets --------------------------------------------------------------------------------------------------

    def reset_worker(self) -> None:
        if (worker := self._worker()) is not None:
            self._reset(worker.process, "connections of workers reset", "workers")

    def reset_frontend(self) -> None:
        if self.system.frontends:
            process = self.rng.choice(self.system.frontends).process
            self._reset(process, "connections of frontends reset", "schedulers")

    def _reset(self, process: SimulatedProcess, what: str, cause: str) -> None:
        if self._count(what, cause):
            self.system.network.reset(process)

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
    poisoned = rng.choice(POISONED)
    outlives = {"has_tier": seed % 5 == 0, "has_keeper": seed % 3 == 0}
    layouts = with_second(seed, replace(layout(rng, poisoned), **outlives), poisoned)
    system = System(seed, layouts[0], trace, layouts[1:])
    noisy = seed % 2 == 1
    system.hub.log("seed", seed, "noisy" if noisy else "orderly", poisoned, *layouts)
    with system.libraries():
        system.start()
        for _ in range(rng.randint(3, 9)):
            system.send_later(system.draw_request(rng.uniform(0.5, REQUESTS_END)))
        send_poison(system, poisoned, rng)
        faults = SystemFaults(system, noisy, poisoned)
        system.hub.run(HEAL + 0.1)
        ended = system.hub.run(BOUND, lambda: system.answered and system.serving)
        assert ended, f"not serving, or open after {BOUND:g} s: {_open(system)}"
        for engine in system.engines:
            for worker in engine.workers:
                worker.device.lacks_memory = False  # no step has met it
        probes = [system.draw_request(system.hub.now) for _ in system.frontends]
        for frontend, probe in zip(system.frontends, probes, strict=True):
            probe.leaves_after = None
            system.requests.append(probe)
            frontend.accept(probe)
        assert system.hub.run(BOUND, lambda: system.answered and system.quiet), f"no progress: {_open(system)}"
        system.hub.run(SILENCE + 2.0)  # leases end, and broken connections are found
        assert system.hub.run(BOUND, lambda: system.quiet), "a rank that hangs is not replaced"
        check(system, noisy, {probe.name for probe in probes})
        loads = sum(worker.device.num_loads for engine in system.engines for worker in engine.workers)
        if not noisy and not faults.losses["workers"] and not faults.losses["weights"]:
            assert loads == sum(each.num_ranks for each in layouts), f"weights were read {loads} times"
    return system


def send_poison(system: System, poisoned: Poisoned, rng: Random) -> None:
    """Send the poisonous requests of a run."""
    match poisoned:
        case Poisoned.WORKERS:
            system.expected_statuses |= {6, 7, -11}
            draw, count = system.draw_poison, rng.choice((1, 1, 2, 3))
        case Poisoned.SCHEDULERS:  # a second one could take down the scheduler while a suspect is on trial
            system.expected_statuses.add(-11)
            draw, count = system.draw_lethal, 1
        case Poisoned.NONE:
            return
    for _ in range(count):
        system.send_later(draw(rng.uniform(0.5, REQUESTS_END)))


def _open(system: System) -> list[str]:
    return [request.name for request in system.requests if not request.outcome]


def check(system: System, noisy: bool, probes: set[str]) -> None:
    for request in system.requests:
        check_answer(request, noisy)
        allowed = {"done", "left", "broken"} | (TYPED if noisy and request.name not in probes else set())
        if len(system.engines) > 1 and not all(choice.submitted for choice in request.choices):
            # One engine refuses it by its settings, or lacks its adapter, and no other one can take it now
            allowed |= {"400", "429", "503", "500" if request.lora is not None else ""}
        if request.is_poison:
            allowed = (allowed | {"500"}) - {"done"}
            if not noisy and request.outcome == "500" and request.lora is None:
                assert "it is refused" in request.error, request.error
            system.happened["poisonous requests refused"] += "it is refused" in request.error
        assert request.outcome in allowed, f"request {request.name}: {request.outcome} {request.error}"
        system.happened[f"requests {request.outcome}"] += 1
    for frontend in system.frontends:
        for (what, _, reason), count in frontend.engine.owners.decisions.items():
            system.happened[f"{what}: {reason}"] += count
        for engine in frontend.engine.engines.values():
            system.happened["tokens fetched"] += int(engine.state.stats.get("kv_tier_hit_tokens_total:peer", 0))
    system.check_leaks()
    if not noisy:
        system.check_placement()
