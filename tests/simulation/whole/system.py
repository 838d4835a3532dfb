"""Whole engines under one virtual clock: production code from the frontend's client to the worker's session.

Simulated are the network, the clock and threads, the devices of the workers, the HTTP clients, and the supervisor that
starts processes again. Everything else is production code: `EngineClient` with its ledger and streams, the scheduler's
`Service` with `EngineCore` and `WorkerGroup`, both connections of the worker with `Worker`, `Session` and
`ResultSender`, `protocol.transport` and the codec. They reach the simulation through the interfaces of the libraries
that they use: `time`, `threading`, `queue`, `zmq`, an event loop of asyncio, `ModelRunner`.
"""

import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal, NoReturn

import pytest
import zmq

from protocol.epochs import incarnation_of
from protocol.requests import EnginePhase
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from services.config import SchedulerConfig, WorkerConfig
from services.frontend.placement import placement
from services.scheduler.service import Service
from services.scheduler.structured_output import StructuredOutput
from services.worker import result_sender, start_up
from services.worker.service import Worker, run_worker
from services.worker.tiers import peers, transfers
from services.worker.tiers.transfers import Tier
from tests.simulation.grammar import structured
from tests.simulation.whole.client import PREFILL_TOKENS, ClientRequest, SimulatedFrontend, make_choice
from tests.simulation.whole.device import VOCAB, Collectives, DeviceTraits, Poison, SimulatedDevice, Strike
from tests.simulation.whole.grammars import SimulatedCompiler, SimulatedMaskThread
from tests.simulation.whole.hub import Hub, Killed, Primitives, SimulatedProcess
from tests.simulation.whole.network import SimulatedNetwork, Speeds, Wakeup
from tests.simulation.whole.tier import BLOCKS_PER_ANSWER, WIDTH, SimulatedKeeper, SlowTier
from tests.simulation.workload import ADAPTERS

SILENCE = 4.0
"""Seconds without a message after which the others look for another scheduler."""
PATIENCE = 60.0
REQUEST_TIMEOUT = 200.0
"""Suspects wait for one another."""
EOS = 1
BLOCK_SIZE = 4
LOGS = "runahead"


@dataclass
class WorkerProcess:
    process: SimulatedProcess
    device: SimulatedDevice
    engine: "SimulatedEngine"


@dataclass
class Layout:
    """Sizes and settings of one engine, and those that all engines of a system share: frontends, speeds of the network,
    and what outlives processes."""

    num_frontends: int = 2
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    num_spares: int = 0
    depth: int = 2
    drafts: bool = False
    late_masks: bool = True
    """Masks are made beside the scheduler's loop."""
    mask_seconds: tuple[float, ...] = (0.0, 0.0002, 0.01, 0.1, 0.6)
    """Time that masks take then: some are made within a step, some take several."""
    leaves_rows_out: bool = True
    """Workers sample a step without the rows whose masks are late."""
    num_blocks: int = 48
    step_seconds: float = 0.05
    load_seconds: float = 0.5
    speeds: Speeds = field(default_factory=Speeds)
    has_tier: bool = False
    """Workers write whole blocks to a tier, which outlives all processes, and load them."""
    has_keeper: bool = False
    """KV memory outlives its worker."""
    has_peers: bool = False
    """Workers fetch whole blocks from those of the other engine."""
    number: int = 0
    """Position of the engine among those of its system."""
    role: Literal["both", "prefill", "decode"] = "both"
    max_queued: int = 128
    step_tokens: int = 24
    has_grammars: bool = True
    """Structured output is served."""
    max_loras: int = 0
    """Requests have adapters, if there are any."""
    loads_adapters: bool = True
    """Workers have the files of adapters."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def num_workers(self) -> int:
        return self.num_ranks + self.num_spares

    def config(self) -> SchedulerConfig:
        return SchedulerConfig(
            worker_endpoint=f"tcp://127.0.0.1:{7002 + 10 * self.number}",
            client_endpoint=f"tcp://127.0.0.1:{7001 + 10 * self.number}",
            role=self.role,
            max_num_queued_reqs=self.max_queued,
            enable_lora=self.max_loras > 0,
            max_loras=max(self.max_loras, 1),
            block_size=BLOCK_SIZE,
            max_num_seqs=6,
            max_num_batched_tokens=self.step_tokens,
            tensor_parallel_size=self.tensor_parallel,
            pipeline_parallel_size=self.pipeline_parallel,
            batch_queue_depth=self.depth,
            heartbeat_timeout_seconds=3.0,
            step_timeout_seconds=5.0,
            load_timeout_seconds=10.0,
            scheduler_timeout_seconds=SILENCE,
            recovery_timeout_seconds=PATIENCE,
            speculative_config=(
                {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False} if self.drafts else None
            ),
        )


class SimulatedEngine:
    """The scheduler and the workers of one engine, which a supervisor starts again."""

    def __init__(self, system: "System", layout: Layout) -> None:
        self.system, self.layout, self.config = system, layout, layout.config()
        self.collectives = Collectives(system.hub)
        self.workers: list[WorkerProcess] = []
        self.schedulers: list[SimulatedProcess] = []
        """Schedulers that have not ended, stopped ones included."""
        self.scheduler: SimulatedProcess | None = None
        """The latest one."""
        self.service: Service | None = None
        self.wakeup: Wakeup | None = None
        """Signals to its scheduler."""
        self.incarnation = 1_000_000

    def _next_incarnation(self) -> int:
        """Return an equal one for two engines whenever that is possible: they do not know of each other."""
        first = self.system.engine
        if self is first or first.incarnation <= self.incarnation:
            self.incarnation += self.system.rng.randint(1, 5000)
        else:
            self.incarnation = first.incarnation
        return self.incarnation

    def start_scheduler(self) -> None:
        system, incarnation = self.system, self._next_incarnation()
        process = self.scheduler = SimulatedProcess(system.hub, system.name("scheduler"))
        self.schedulers.append(process)
        process.on_end.append(lambda: self.schedulers.remove(process))
        self.service = self.wakeup = None

        def crash() -> NoReturn:
            system.happened["schedulers crashed by a request"] += 1
            process.end(-11)
            raise Killed

        def main() -> None:
            layout, wakeup = self.layout, Wakeup(system.network)
            compiler = SimulatedCompiler(system.network, system.lethal, crash) if layout.has_grammars else None
            masks = SimulatedMaskThread(system.network, layout.mask_seconds) if layout.late_masks else None
            service = Service(self.config, incarnation, StructuredOutput(compiler, masks))
            if self.scheduler is process:
                self.service, self.wakeup = service, wakeup
            process.end(service.run(wakeup))

        system.supervise(process, self._start_scheduler_again)
        process.start(main)

    def _start_scheduler_again(self) -> None:
        if self.scheduler is None or not self.scheduler.alive:  # otherwise another one has taken its place
            self.start_scheduler()

    def start_worker(self) -> None:
        system, layout = self.system, self.layout
        process = SimulatedProcess(system.hub, system.name("worker"))
        seconds = layout.load_seconds, layout.step_seconds
        traits = DeviceTraits(layout.num_blocks, *seconds, layout.leaves_rows_out, layout.loads_adapters)
        device = SimulatedDevice(
            *(system.hub, process, self.collectives, traits),
            *(system.future, system.poisons, system.happened, system.keeper),
        )
        worker = WorkerProcess(process, device, self)
        self.workers.append(worker)
        config = WorkerConfig(
            backend="sim",
            scheduler_endpoint=self.config.worker_endpoint,
            host_ip="127.0.0.1",
            scheduler_timeout_seconds=SILENCE,
            recovery_timeout_seconds=PATIENCE,
            kv_offload_bytes=int(layout.has_tier),
            kv_peer_address="tcp://127.0.0.1:0" if layout.has_peers else "",
        )

        def tiers(_: WorkerConfig, identity: str) -> list[Tier]:
            kept = system.tiers.setdefault(identity, {})
            return [SlowTier(system.hub, kept, system.happened)] if layout.has_tier else []

        process.on_end.append(lambda: self.workers.remove(worker))
        system.supervise(process, self.start_worker)
        process.start(lambda: process.end(run_worker(Worker(config, device, make_tiers=tiers))))

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[SimulatedProcess]:
        return [*(worker.process for worker in self.workers), *self.schedulers]

    @property
    def serving(self) -> bool:
        """Return whether all processes run."""
        return (
            self.service is not None
            and len(self.workers) == len(self.service.workers.by_name) == self.layout.num_workers
            and self.service.group.status.num_workers == self.layout.num_workers
        )

    @property
    def quiet(self) -> bool:
        """Return whether the scheduler has nothing to do."""
        engine = self.service.engine if self.service is not None else None
        return engine is not None and not engine.requests and not engine.queue

    def check_leaks(self) -> None:
        """Nothing is left of requests, steps and processes that have ended."""
        service, num_frontends = self.service, len(self.system.frontends)
        engine = service.engine
        epoch, slots = engine.epoch, engine.epoch.slots
        assert epoch.kv.num_free == epoch.limits.num_blocks, f"{epoch.kv.num_free} blocks are free"
        assert len(slots.free) == epoch.limits.num_slots, "slots are held"
        assert not len(epoch.running)
        assert not engine.store.num_waiting
        assert not epoch.fences
        assert not engine.queue.unmasked, "a step waits for masks"
        assert not engine.store.suspects.active
        frontends, workers = service.frontends.peers, service.workers.by_name
        assert len(frontends) == num_frontends, f"{len(frontends)} frontends"
        assert all(frontend.heard is not None for frontend in frontends.values()), "a frontend has no lease"
        assert service.cached_blocks.next_message.keys() <= frontends.keys(), "a lost frontend follows the cache"
        assert len(workers) == len(self.workers), f"{len(workers)} workers"
        assert incarnation_of(service.group.epoch) == service.incarnation
        assert service.group.status.phase is EnginePhase.READY
        running = [scheduler for scheduler in self.schedulers if not scheduler.stopped]
        assert len(running) == 1, "a scheduler that was replaced goes on"


class System:
    def __init__(
        self, seed: int, layout: Layout, trace: Callable[[str], None] | None = None, more: Sequence[Layout] = ()
    ) -> None:
        """`more`: of further engines."""
        self.hub = Hub(seed, trace)
        self.rng: Random = self.hub.rng
        self.layout = layout
        self.network = SimulatedNetwork(self.hub, layout.speeds)
        self.happened: Counter[str] = self.network.happened
        self.frontends: list[SimulatedFrontend] = []
        self.engines = [SimulatedEngine(self, each) for each in (layout, *more)]
        self.engine = self.engines[0]
        """The only one of most systems."""
        self.requests: list[ClientRequest] = []
        self.starting = 0
        """Processes that the supervisor will start."""
        self.expected_statuses: set[int] = {0, 8}
        """With which a process may end by itself."""
        self.poisons: dict[str, Poison] = {}
        """Requests that take down workers, by name."""
        self.tiers: dict[str, dict[bytes, bytes]] = {}
        """Blocks by name, by the identity of the rank that wrote them."""
        self.keeper = SimulatedKeeper() if layout.has_keeper else None
        self.lethal: dict[str, int] = {}
        """Grammars that take down the scheduler, with the number of tokens after which they do."""
        self._names, self._of_adapters = Counter[str](), Random(f"adapters of {seed}")
        self._sequences: dict[tuple[tuple[int, ...], int], list[int]] = {}

    # -- processes -----------------------------------------------------------------------------------------------

    def name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind}{self._names[kind]}"

    def start(self) -> None:
        for engine in self.engines:
            self._soon(1.0, engine.start_scheduler)
        for _ in range(self.layout.num_frontends):
            self._soon(1.0, self.start_frontend)
        for engine in self.engines:
            for _ in range(engine.layout.num_workers):
                self._soon(1.0, engine.start_worker)

    def _soon(self, seconds: float, start: Callable[[], None]) -> None:
        self.starting += 1

        def do() -> None:
            self.starting -= 1
            start()

        self.hub.after(self.rng.uniform(0.0, seconds), do)

    def supervise(self, process: SimulatedProcess, again: Callable[[], None]) -> None:
        """Start another process after one has ended."""

        def ended() -> None:
            if process.status not in (self.expected_statuses | {-9}):
                self.hub.failures.append(AssertionError(f"{process.name} has ended with status {process.status}"))
            self.happened[f"{process.name.rstrip('0123456789')} status {process.status}"] += 1
            self._soon(2.0, again)

        process.on_end.append(ended)

    def start_frontend(self) -> None:
        endpoints = [engine.config.client_endpoint for engine in self.engines]
        frontend = SimulatedFrontend(self.network, self.name("frontend"), endpoints, SILENCE, PATIENCE, REQUEST_TIMEOUT)
        self.frontends.append(frontend)
        frontend.process.on_end.append(lambda: self.frontends.remove(frontend))
        self.supervise(frontend.process, self.start_frontend)

    # -- requests ------------------------------------------------------------------------------------------------

    def draw_request(self, at: float, kind: str = "") -> ClientRequest:
        """Draw a request; `kind` "" is any kind."""
        rng, lengths = self.rng, (1, 3, 8, 13, 24, *(40,) * self.layout.has_peers)
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.choice(lengths))]
        if self.requests and rng.random() < 0.3:  # a shared prefix
            prompt = self.requests[-1].prompt[:8] + prompt[:8]
        kind = kind or rng.choice(("plain", "plain", "sampled", "n", "grammar", "logprobs", "embedding"))
        # Each has a grammar of its own: one of them may be lethal.
        grammar = structured(1000 * len(self.requests) + rng.randrange(1000)) if kind == "grammar" else None
        pooling = Pooling.MEAN if kind == "embedding" else Pooling.NONE
        sampling = []
        most = 1 if kind == "embedding" else rng.choice((1, 4, 12, 30, 30))
        for index in range(3 if kind == "n" else 1):
            params = SamplingParams(
                max_tokens=most,
                temperature=1.0 if kind in ("sampled", "n") else 0.0,
                seed=rng.randrange(1000) + 1000 * index,
                eos_token_ids=(EOS,),
                logprobs=2 if kind == "logprobs" else None,
                prompt_logprobs=1 if kind == "logprobs" else None,
            )
            sampling.append(params)
        leaves = rng.uniform(0.0, 3.0) if rng.random() < 0.1 else None
        return self.make_request(at, prompt, sampling, grammar, pooling, leaves)

    def make_request(
        self,
        at: float,
        prompt: list[int],
        sampling: list[SamplingParams],
        grammar: StructuredOutputParams | None = None,
        pooling: Pooling = Pooling.NONE,
        leaves: float | None = None,
    ) -> ClientRequest:
        """Return a request with a choice for each of `sampling`; the client leaves after so many seconds."""
        choices = [make_choice(prompt, params, grammar, pooling) for params in sampling]
        for params, choice in zip(sampling, choices, strict=True):
            self._sequences[tuple(prompt), params.seed] = prompt + choice.expected.tokens
        lora = self._of_adapters.choice((None, *ADAPTERS)) if self.layout.max_loras else None
        return ClientRequest(f"{len(self.requests)}", at, prompt, choices, grammar, pooling, lora, leaves)

    def draw_poison(self, at: float) -> ClientRequest:
        """Draw a request that takes down the workers whenever they compute a certain position of it."""
        request = self.draw_request(at)
        last = len(request.prompt) - 1 + max(0, min(len(c.expected.tokens) for c in request.choices) - 1)
        # A hang is noticed late: two of them would take longer than clients wait.
        strikes = [strike for strike in Strike if strike is not Strike.HANGS or not self.poisons]
        strike, everywhere = self.rng.choice(strikes), self.rng.random() < 0.5
        self.poisons[request.name] = Poison(strike, self.rng.randint(0, last), everywhere)
        request.is_poison = True
        return request

    def draw_lethal(self, at: float) -> ClientRequest:
        """Draw a request that takes down the scheduler whenever a certain mask of it is made."""
        request = self.draw_request(at, "grammar")
        tokens = min(len(choice.expected.tokens) for choice in request.choices)
        self.lethal[request.structured.text] = self.rng.randrange(tokens)
        request.is_poison = True
        return request

    def future(self, prompt: list[int], seed: int) -> list[int]:
        return self._sequences[tuple(prompt), seed]

    def send(self, at: float, kind: str = "") -> ClientRequest:
        """Draw a request whose client waits for its end, and send it at that time."""
        request = self.draw_request(at, kind)
        request.leaves_after = None
        self.send_later(request)
        return request

    def send_later(self, request: ClientRequest) -> None:
        self.requests.append(request)
        self.hub.after(request.at - self.hub.now, partial(self._send, request))

    def _send(self, request: ClientRequest) -> None:
        if self.frontends:
            self.rng.choice(self.frontends).accept(request)
        else:
            request.outcome = "broken"

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def answered(self) -> bool:
        return all(request.outcome for request in self.requests)

    @property
    def serving(self) -> bool:
        """Return whether all processes run, and every frontend can execute requests."""
        return (
            not self.starting
            and len(self.frontends) == self.layout.num_frontends
            and all(engine.serving for engine in self.engines)
            and all(engine.ready for frontend in self.frontends for engine in frontend.engine.engines.values())
        )

    @property
    def quiet(self) -> bool:
        """Return whether no scheduler has anything to do."""
        return self.serving and all(engine.quiet for engine in self.engines)

    def check_leaks(self) -> None:
        """Nothing is left of requests, steps and processes that have ended."""
        for engine in self.engines:
            engine.check_leaks()
        for frontend in self.frontends:
            assert not frontend.engine.num_open, "a frontend keeps a request"
            assert not frontend.engine.ledger.has_unsent

    def check_placement(self) -> None:
        """Frontends of several engines know which blocks each engine has cached, and no other ones. A repeated end of a
        subscription, which TCP prevents, would end it."""
        for frontend in self.frontends if len(self.engines) > 1 else ():
            for engine in self.engines:
                cached = engine.service.engine.epoch.kv.pool.by_hash.keys()
                assert frontend.blocks[str(engine.layout.number)] == cached, f"blocks of {frontend.process.name}"

    # -- the libraries -------------------------------------------------------------------------------------------

    @contextmanager
    def libraries(self) -> Iterator[None]:
        """Replace clocks, threads and sockets while this system runs."""
        hub, primitives = self.hub, Primitives(self.hub)
        disabled = logging.root.manager.disable
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", hub.monotonic)
            patch.setattr(time, "sleep", hub.sleep)
            patch.setattr(os, "_exit", hub.exit_now)
            patch.setattr(zmq.Context, "instance", self.network.context)
            patch.setattr(zmq, "Poller", self.network.poller)
            patch.setattr(result_sender, "threading", primitives)
            patch.setattr(result_sender, "queue", primitives)
            patch.setattr(transfers, "threading", primitives)
            patch.setattr(transfers, "SimpleQueue", primitives.SimpleQueue)
            patch.setattr(peers, "threading", primitives)
            for module in (peers, transfers):
                patch.setattr(module, "MAX_FETCH_BYTES", BLOCKS_PER_ANSWER * BLOCK_SIZE * WIDTH)
            patch.setattr(result_sender, "processor_seconds", lambda: hub.process.work if hub.process else 0.0)
            patch.setattr(placement, "PREFILL_TOKENS", PREFILL_TOKENS)
            patch.setattr(start_up, "listen", lambda host: SimulatedListener(self.network.next_id()))
            patch.setattr(logging, "shutdown", lambda: None)
            patch.setattr(gc, "collect", lambda *_: 0)
            patch.setattr(gc, "freeze", lambda: None)
            handler = _EventLog(hub)
            root = logging.getLogger(LOGS)
            if hub.tracing:
                root.addHandler(handler)
            else:
                logging.disable(logging.CRITICAL)
            try:
                yield
            finally:
                self.close()
                root.removeHandler(handler)
                logging.disable(disabled)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Run until every process serves and nothing is left to do."""
        with self.libraries():
            self.start()
            assert self.hub.run(30.0, lambda: self.quiet)
            yield

    def close(self) -> None:
        """End all processes."""
        self.expected_statuses.add(-15)
        for frontend in list(self.frontends):
            frontend.process.end(-15)
        for process in [process for engine in self.engines for process in engine.processes]:
            process.end(-15)
        self.hub.failures.clear()
        self.hub.run(0.0)
        if self.keeper is not None:
            self.keeper.memories.close()


class SimulatedListener:
    """The rendezvous of a worker."""

    def __init__(self, port: int) -> None:
        self._port = port

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def close(self) -> None:
        pass


class _EventLog(logging.Handler):
    """Adds the log lines of services to the event log."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub

    def emit(self, record: logging.LogRecord) -> None:
        process = self._hub.process
        self._hub.log(process.name if process else "-", record.levelname.lower(), record.getMessage())
