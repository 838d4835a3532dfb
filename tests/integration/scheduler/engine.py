"""Scheduler and worker as real processes over ipc, and a client that speaks the scheduler's client socket."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from protocol.codec import Decoder, pack, unpack
from protocol.requests import (
    AbortRequest,
    EngineMessage,
    EnginePhase,
    EngineState,
    Finish,
    GenerateRequest,
    RequestOutputs,
)
from protocol.rows import LogprobRows
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.transport import Client
from services.config import SchedulerConfig, WorkerConfig

PATIENCE = 120.0
"""Seconds after which a silent engine fails a test."""


def spawn(service: str, config: SchedulerConfig | WorkerConfig) -> subprocess.Popen[str]:
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        f"from services.config import {type(config).__name__} as Config\n"
        f"from services.{service}.service import run\n"
        "sys.exit(run(Config.model_validate_json(sys.argv[1])))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, config.model_dump_json()], stderr=subprocess.PIPE, text=True
    )


class EngineClient:
    """One frontend's side of the client socket."""

    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint)
        self._client.handshake("frontend", "test", PATIENCE)
        self._decoder: Decoder[RequestOutputs | EngineState] = Decoder(EngineMessage)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finish] = {}
        self.logprobs: dict[int, dict[int, tuple[int, bytes, bytes]]] = {}
        """By request and position: rank, ids and log-probabilities as bytes; the first that came."""
        self.embeddings: dict[int, bytes] = {}
        self.state: EngineState | None = None

    def wait_ready(self) -> EngineState:
        while self.state is None or self.state.phase is not EnginePhase.READY:
            self.receive()
        return self.state

    def generate(
        self,
        number: int,
        prompt: list[int],
        params: SamplingParams,
        priority: int = 0,
        structured: StructuredOutputParams | None = None,
        pooling: Pooling = Pooling.NONE,
    ) -> None:
        self.tokens[number], self.logprobs[number] = [], {}
        message = GenerateRequest(
            number, pack(prompt), len(prompt), params, priority, structured=structured, pooling=pooling
        )
        self._client.send(message)

    def resubmit(
        self,
        number: int,
        prompt: list[int],
        delivered: list[int],
        params: SamplingParams,
        structured: StructuredOutputParams | None = None,
    ) -> None:
        """A request whose first tokens were delivered before."""
        self.tokens[number], self.logprobs[number] = list(delivered), {}
        tokens = pack([*prompt, *delivered])
        self._client.send(GenerateRequest(number, tokens, len(prompt), params, structured=structured))

    def abort(self, *numbers: int) -> None:
        self._client.send(AbortRequest(list(numbers)))

    def receive(self) -> RequestOutputs | EngineState:
        """The next message, applied. Token indices must be contiguous, and nothing may follow a finish."""
        frame = self._client.receive(PATIENCE)
        assert frame is not None, "the engine is silent"
        message = self._decoder.decode(frame)
        match message:
            case EngineState():
                self.state = message
            case RequestOutputs():
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

    def _take_logprobs(self, message: RequestOutputs) -> None:
        if message.logprobs is None:
            return
        rows = LogprobRows.of(message.logprobs)
        at = np.cumsum(rows.counts) - rows.counts
        for i, number in enumerate(rows.owners.view(np.uint32).tolist()):
            entries = slice(at[i], at[i] + rows.counts[i])
            entry = int(rows.ranks[i]), rows.token_ids[entries].tobytes(), rows.values[entries].tobytes()
            self.logprobs[number].setdefault(int(rows.positions[i]), entry)

    def wait_finished(self, *numbers: int) -> None:
        while not set(numbers) <= set(self.finished):
            self.receive()

    def close(self) -> None:
        self._client.close()


class Engine:
    def __init__(
        self, directory: Path, scheduler: SchedulerConfig, worker: WorkerConfig, num_workers: int
    ) -> None:
        self.directory = directory
        self.client_endpoint = scheduler.client_endpoint
        self._worker_config = worker
        self.scheduler = spawn("scheduler", scheduler)
        self.workers = [spawn("worker", worker) for _ in range(num_workers)]

    @property
    def worker(self) -> subprocess.Popen[str]:
        """The first one."""
        return self.workers[0]

    def add_worker(self, **changes: object) -> subprocess.Popen[str]:
        """One more, of the same configuration but for `changes`."""
        config = WorkerConfig.model_validate(self._worker_config.model_dump() | changes)
        self.workers.append(spawn("worker", config))
        return self.workers[-1]

    def stop(self) -> tuple[int, ...]:
        """Drains and waits. Returns the exit statuses, the scheduler's first."""
        self.scheduler.send_signal(signal.SIGTERM)
        return tuple(process.wait(PATIENCE) for process in (self.scheduler, *self.workers))

    def kill(self) -> None:
        for process in (self.scheduler, *self.workers):
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()


@contextmanager
def engine(
    directory: Path, scheduler: dict[str, object], worker: dict[str, object], num_workers: int = 1
) -> Iterator[Engine]:
    """A scheduler and workers; whatever happens, no process is left."""
    endpoints = {name: f"ipc://{directory}/{name}" for name in ("w", "c")}
    running = Engine(
        directory,
        SchedulerConfig.model_validate(
            {"worker_endpoint": endpoints["w"], "client_endpoint": endpoints["c"], **scheduler}
        ),
        WorkerConfig.model_validate({"scheduler_endpoint": endpoints["w"], **worker}),
        num_workers,
    )
    try:
        yield running
    finally:
        running.kill()
