"""Scheduler and workers as real processes over ipc, and a frontend's client of the scheduler."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from protocol.codec import Decoder, pack, unpack
from protocol.lora import LoRAAdapter
from protocol.requests import (
    AbortRequest,
    EngineMessage,
    EnginePhase,
    EngineState,
    Finish,
    FrontendAlive,
    GenerateRequest,
    RequestOutputs,
)
from protocol.rows import LogprobRows
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.security import LOCAL, Security
from protocol.transport import Client
from services.checkpoint import DEMO_MODEL
from services.config import SchedulerConfig, WorkerConfig
from tests.preloaded import PreloadedProcess

PATIENCE = 240.0
"""Seconds without progress after which a test fails. Kernels may have to be compiled, on a busy machine."""


def code_of(service: str, config: SchedulerConfig | WorkerConfig) -> str:
    """Return code that runs a service with the configuration in its first argument, and logs to stderr."""
    return (
        "import logging, sys\n"
        "form = '%(asctime)s %(levelname)s %(name)s %(message)s'\n"
        f"logging.basicConfig(level='{config.log_level.upper()}', format=form)\n"
        f"from services.config import {type(config).__name__} as Config\n"
        f"from services.{service}.service import run\n"
        "sys.exit(run(Config.model_validate_json(sys.argv[1])))"
    )


def _advance(state: EngineState) -> tuple[object, ...]:
    """Return the fields of a state that change when the engine makes progress."""
    stats = state.stats
    return state.phase, state.detail, state.progress, stats.get("num_workers"), stats.get("steps_total")


class FrontendConnection:
    """One frontend's connection to the scheduler."""

    def __init__(self, endpoint: str, security: Security = LOCAL) -> None:
        self._client = Client(endpoint, security)
        self._client.handshake("frontend", "test", PATIENCE)
        self._decoder: Decoder[RequestOutputs | EngineState] = Decoder(EngineMessage)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.logprobs: dict[int, dict[int, tuple[int, bytes, bytes]]] = {}
        """Request -> position -> rank, ids and log-probabilities as bytes; the first that arrived."""
        self.embeddings: dict[int, bytes] = {}
        self.state: EngineState | None = None
        self._moved = time.monotonic()
        """Time of the last progress of the engine, or of the last message to it."""

    def wait_ready(self) -> EngineState:
        return self.wait_state(lambda state: state.phase is EnginePhase.READY)

    def generate(
        self,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        structured: StructuredOutputParams | None = None,
        pooling: Pooling = Pooling.NONE,
        request_id: str = "",
        cache_salt: str = "",
        lora: LoRAAdapter | None = None,
    ) -> None:
        self.tokens[number], self.logprobs[number] = [], {}
        message = GenerateRequest(
            number,
            pack(prompt),
            len(prompt),
            params,
            priority,
            cache_salt,
            request_id,
            structured=structured,
            pooling=pooling,
            lora=lora,
        )
        self.send(message)

    def generate_all(self, numbers: Iterable[int], tokens: int, growth: int = 1) -> None:
        """Send requests of `tokens` tokens, every other one sampled. Their prompts differ in content and length."""
        for number in numbers:
            prompt = [(number * 37 + i * 11) % 1000 for i in range(24 + growth * number)]
            self.generate(number, prompt, SamplingParams(tokens, temperature=float(number % 2), seed=number))

    def abort(self, *numbers: int) -> None:
        self.send(AbortRequest(list(numbers)))

    def send(self, message: GenerateRequest | AbortRequest | FrontendAlive) -> None:
        self._moved = time.monotonic()
        self._client.send(message)

    def receive(self) -> RequestOutputs | EngineState:
        """Receive and apply the next message. Token indices must be contiguous, and nothing may follow a finish."""
        frame = self._client.receive(PATIENCE)
        assert frame is not None, f"the engine is silent: {self.state}"
        message = self._decoder.decode(frame)
        match message:
            case EngineState():
                self._watch(message)
                self.state = message
            case RequestOutputs():
                self._moved = time.monotonic()
                numbers = np.frombuffer(message.numbers, np.uint32).tolist()
                for number, index, token in zip(
                    numbers, unpack(message.indices).tolist(), unpack(message.token_ids).tolist(), strict=True
                ):
                    assert number not in self.finished, "a token after the finish"
                    assert index == len(self.tokens[number]), "token indices must be contiguous"
                    self.tokens[number].append(token)
                self._take_logprobs(message)
                self.embeddings |= {embedding.number: embedding.values for embedding in message.embeddings}
                for finish in message.finished:
                    assert finish.number not in self.finished, "a second finish"
                    self.finished[finish.number] = finish
        return message

    def _watch(self, state: EngineState) -> None:
        """Fail if the engine makes no progress. A busy engine reports its state every second, a stuck one too."""
        if self.state is None or _advance(self.state) != _advance(state):
            self._moved = time.monotonic()
        assert time.monotonic() - self._moved < PATIENCE, f"the engine comes no further: {state}"

    def _take_logprobs(self, message: RequestOutputs) -> None:
        if message.logprobs is None:
            return
        rows = LogprobRows.from_message(message.logprobs)
        at = np.cumsum(rows.counts) - rows.counts
        for i, number in enumerate(rows.owners.view(np.uint32).tolist()):
            entries = slice(at[i], at[i] + rows.counts[i])
            entry = (int(rows.token_ranks[i]), rows.token_ids[entries].tobytes(), rows.values[entries].tobytes())
            self.logprobs[number].setdefault(int(rows.positions[i]), entry)

    def read_until(self, condition: Callable[[], object]) -> None:
        """Receive messages until the condition holds."""
        while not condition():
            self.receive()

    def wait_state(self, wanted: Callable[[EngineState], object]) -> EngineState:
        """Receive messages until the engine's state is as wanted."""
        while self.state is None or not wanted(self.state):
            self.receive()
        return self.state

    def wait_finished(self, *numbers: int) -> None:
        self.read_until(lambda: set(numbers) <= set(self.finished))

    def close(self) -> None:
        self._client.close()


class EngineProcesses:
    def __init__(self, directory: Path, scheduler: SchedulerConfig, worker: WorkerConfig, num_workers: int) -> None:
        self.directory = directory
        self.client_endpoint = scheduler.client_endpoint
        self._worker_config = worker
        self.connections = ExitStack()
        """Closes the connections of the test, before the processes end."""
        self._logs: dict[PreloadedProcess, Path] = {}
        """Process -> its log file, of all processes that were started."""
        self.scheduler = self._spawn("scheduler", scheduler)
        self.workers = [self._spawn("worker", worker) for _ in range(num_workers)]

    def connect(self) -> FrontendConnection:
        """Return a frontend's connection once the engine is ready."""
        client = FrontendConnection(self.client_endpoint)
        self.connections.callback(client.close)
        client.wait_ready()
        return client

    def _spawn(self, service: str, config: SchedulerConfig | WorkerConfig) -> PreloadedProcess:
        path = self.directory / f"{len(self._logs)}-{service}.log"
        with path.open("w") as log:
            process = PreloadedProcess(code_of(service, config), config.model_dump_json(), log=log)
        self._logs[process] = path
        return process

    def log(self, process: PreloadedProcess) -> str:
        """Return the process's log so far."""
        return self._logs[process].read_text()

    @property
    def worker(self) -> PreloadedProcess:
        """The first worker."""
        return self.workers[0]

    def add_worker(self, **changes: object) -> PreloadedProcess:
        """Start another worker with the same configuration except for `changes`."""
        config = WorkerConfig.model_validate(self._worker_config.model_dump() | changes)
        self.workers.append(self._spawn("worker", config))
        return self.workers[-1]

    def stop(self) -> tuple[int, ...]:
        """Drain and wait. Return the exit statuses, the scheduler's first."""
        self.connections.close()
        self.scheduler.send_signal(signal.SIGTERM)
        return tuple(process.wait(PATIENCE) for process in (self.scheduler, *self.workers))

    def kill(self) -> None:
        self.connections.close()
        for process in self._logs:
            process.kill()
            process.wait()

    def print_logs(self) -> None:
        """Print the logs of all processes."""
        for process, path in self._logs.items():
            print(f"== {path.name}, process {process.pid}, exit status {process.poll()}\n{path.read_text()}")


@contextmanager
def engine(
    directory: Path, scheduler: dict[str, object], worker: dict[str, object], num_workers: int = 1
) -> Iterator[EngineProcesses]:
    """Start a scheduler and workers, with the demo model unless another one is named. No process is left at the end."""
    endpoints = {name: f"ipc://{directory}/{name}" for name in ("w", "c")}
    # A simulator with a vocabulary of its own reads no files.
    model = {} if worker.get("sim_vocab_size") else {"model": str(DEMO_MODEL)}
    running = EngineProcesses(
        directory,
        SchedulerConfig.model_validate(
            {
                "model": str(DEMO_MODEL),
                "worker_endpoint": endpoints["w"],
                "client_endpoint": endpoints["c"],
                **scheduler,
            }
        ),
        WorkerConfig.model_validate({**model, "scheduler_endpoint": endpoints["w"], **worker}),
        num_workers,
    )
    try:
        yield running
    except BaseException:
        running.print_logs()
        raise
    finally:
        running.kill()
