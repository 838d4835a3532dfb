"""Scheduler and workers as processes, and a client on the scheduler's socket with a very low cost per token."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from protocol.codec import Decoder, pack
from protocol.records import StepRecord, StepRecords, Subscribe
from protocol.requests import EngineMessage, EnginePhase, EngineState, Finish, GenerateRequest, RequestOutputs
from protocol.sampling import SamplingParams, StructuredOutputParams
from protocol.transport import Client
from services.checkpoint import DEMO_MODEL
from tests.benchmarks.support.servers import BACKENDS, end_on_sigterm

PATIENCE = 60.0
"""Seconds without a message after which the engine counts as failed."""


@contextmanager
def engine(
    scheduler: Mapping[str, object], worker: Mapping[str, object], num_workers: int = 1
) -> Iterator["BenchmarkClient"]:
    """Start an engine and yield its client. The mappings are settings by field name; the demo model is the default.

    Raises: SystemExit, if the worker's backend is vllm and there is no interpreter with it.
    """
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="runahead-") as directory, ExitStack() as stack:
        clients, workers = f"ipc://{directory}/c", f"ipc://{directory}/w"
        log = stack.enter_context((Path(directory) / "log").open("w+"))
        worker_python = BACKENDS.get(str(worker.get("backend")), lambda: sys.executable)()
        common: dict[str, object] = {"model": str(DEMO_MODEL), "log_level": "warning"}
        scheduler = {"client_endpoint": clients, "worker_endpoint": workers, **common, **scheduler}
        if worker.get("sim_vocab_size"):  # such a simulator reads no files
            del common["model"]
        worker = {"scheduler_endpoint": workers, **common, **worker}
        for python, service, settings in (
            (sys.executable, "scheduler", scheduler),
            *[(worker_python, "worker", worker)] * num_workers,
        ):
            flags = [_flag(name.replace("_", "-"), value) for name, value in settings.items()]
            process = subprocess.Popen([python, "-m", "services.cli", service, *flags], stderr=log, stdout=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        stack.push(_show_on_error(Path(directory) / "log"))
        client = BenchmarkClient(clients)
        stack.callback(client.close)
        client.wait_ready()
        yield client


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _show_on_error(log: Path) -> Callable[..., None]:
    """Return a callback for an exit stack that prints the log if the block failed."""

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            sys.stderr.write(log.read_text())

    return leave


@dataclass(frozen=True)
class EngineTotals:
    """Totals of the engine at one time."""

    at: float
    """Monotonic clock, seconds."""
    idle: float
    """Seconds in which the worker waited without a plan."""
    steps: float
    running: float
    tokens: int
    """Number of output tokens that the client received."""


class BenchmarkClient:
    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint)
        self._client.handshake("frontend", "benchmark", PATIENCE)
        self._decoder: Decoder[RequestOutputs | EngineState | StepRecords] = Decoder(EngineMessage)
        self.state: EngineState | None = None
        self.tokens = 0
        self.finished = 0
        self.finishes: list[Finish] = []
        self.samples: list[EngineTotals] = []
        self.records: list[StepRecord] = []
        """Step records received; empty without `subscribe`."""

    def subscribe(self) -> None:
        """Subscribe to step records."""
        self._client.send(Subscribe())

    def wait_ready(self) -> None:
        while self.state is None or self.state.phase is not EnginePhase.READY:
            self.receive()

    def generate(
        self,
        prompt: np.ndarray | Sequence[int],
        number: int,
        max_tokens: int,
        structured: StructuredOutputParams | None = None,
        params: SamplingParams | None = None,
    ) -> None:
        """Send a request for `max_tokens` greedy tokens, or with the given `params`. `prompt` is token ids."""
        params = params or SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._client.send(GenerateRequest(number, pack(prompt), len(prompt), params, structured=structured))

    def receive(self, timeout: float | None = None) -> RequestOutputs | None:
        """Read one message and return it if it has outputs. `timeout` is in seconds.

        Raises: TimeoutError, if no message arrives and no `timeout` is given.
        """
        frame = self._client.receive(PATIENCE if timeout is None else timeout)
        if frame is None:
            if timeout is not None:
                return None
            raise TimeoutError(f"no message from the engine for {PATIENCE:.0f} s")
        message = self._decoder.decode(frame)
        if isinstance(message, RequestOutputs):
            self.tokens += len(message.token_ids) // 4
            self.finished += len(message.finished)
            self.finishes += message.finished
            return message
        if isinstance(message, StepRecords):
            self.records += message.records
            return None
        self.state = message
        if "worker_idle_seconds_total" in message.stats:
            stats = message.stats
            self.samples.append(
                EngineTotals(
                    time.monotonic(),
                    stats["worker_idle_seconds_total"],
                    stats["steps_total"],
                    stats["num_requests_running"],
                    self.tokens,
                )
            )
        return None

    def window(self, running: int) -> dict[str, float]:
        """Return the metrics between the first and the last report with so many requests running.

        Raises: SystemExit, if there are too few of them.
        """
        full = [sample for sample in self.samples if sample.running == running and sample.tokens]
        if len(full) < 3:
            raise SystemExit(f"{len(full)} reports with all requests running; the run is too short")
        first, last = full[0], full[-1]
        wall = last.at - first.at
        return {
            "idle_fraction": (last.idle - first.idle) / wall,
            "tokens_per_s": (last.tokens - first.tokens) / wall,
            "step_ms": 1e3 * wall / (last.steps - first.steps),
            "seconds": wall,
        }

    def close(self) -> None:
        self._client.close()
