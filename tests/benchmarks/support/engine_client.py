"""Scheduler and worker as processes, and a client on the scheduler's own socket that costs almost nothing per token."""

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
from protocol.requests import EngineMessage, EnginePhase, EngineState, Finish, GenerateRequest, RequestOutputs
from protocol.sampling import SamplingParams, StructuredOutputParams
from protocol.transport import Client

PATIENCE = 60.0
"""Seconds after which a silent engine is an error."""


@contextmanager
def engine(
    scheduler: Mapping[str, object], worker: Mapping[str, object], num_workers: int = 1
) -> Iterator["EngineClient"]:
    """A client of a fresh engine; the mappings are settings by field name."""
    with tempfile.TemporaryDirectory(prefix="runahead-") as directory, ExitStack() as stack:
        clients, workers = f"ipc://{directory}/c", f"ipc://{directory}/w"
        log = stack.enter_context((Path(directory) / "log").open("w+"))
        for service, settings in (
            ("scheduler", {"client_endpoint": clients, "worker_endpoint": workers, **scheduler}),
            *[("worker", {"scheduler_endpoint": workers, **worker})] * num_workers,
        ):
            flags = [_flag(name.replace("_", "-"), value) for name, value in settings.items()]
            process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", service, *flags], stderr=log, stdout=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        stack.push(_show_on_error(Path(directory) / "log"))
        client = EngineClient(clients)
        stack.callback(client.close)
        client.wait_ready()
        yield client


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _show_on_error(log: Path) -> Callable[..., None]:
    """For an exit stack: what the processes said, if the block failed."""

    def leave(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            sys.stderr.write(log.read_text())

    return leave


@dataclass(frozen=True)
class Sample:
    """The engine's own totals at one moment."""

    at: float
    """Monotonic seconds."""
    idle: float
    """Seconds that the worker waited with no plan queued."""
    busy: float
    """Seconds that the worker computed."""
    steps: float
    running: float
    tokens: int
    """Output tokens that this client received."""


class EngineClient:
    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint)
        self._client.handshake("frontend", "benchmark", PATIENCE)
        self._decoder: Decoder[RequestOutputs | EngineState] = Decoder(EngineMessage)
        self.state: EngineState | None = None
        self.tokens = 0
        self.finished = 0
        self.finishes: list[Finish] = []
        self.samples: list[Sample] = []

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
        """Asks for `max_tokens` greedy tokens after `prompt`, token ids; or for what `params` say."""
        params = params or SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._client.send(GenerateRequest(number, pack(prompt), len(prompt), params, structured=structured))

    def receive(self, timeout: float | None = None) -> RequestOutputs | None:
        """The outputs that came, if any. Raises: TimeoutError, when the engine is silent and no `timeout` was given."""
        frame = self._client.receive(PATIENCE if timeout is None else timeout)
        if frame is None:
            if timeout is not None:
                return None
            raise TimeoutError(f"the engine said nothing for {PATIENCE:.0f} s")
        message = self._decoder.decode(frame)
        if isinstance(message, RequestOutputs):
            self.tokens += len(message.token_ids) // 4
            self.finished += len(message.finished)
            self.finishes += message.finished
            return message
        self.state = message
        if "worker_idle_seconds_total" in message.stats:
            stats = message.stats
            self.samples.append(
                Sample(
                    time.monotonic(),
                    stats["worker_idle_seconds_total"],
                    stats["worker_busy_seconds_total"],
                    stats["steps_total"],
                    stats["num_requests_running"],
                    self.tokens,
                )
            )
        return None

    def close(self) -> None:
        self._client.close()
