"""The worker process: receives plans, runs them, and sends results from a thread of its own.

The main thread never waits for a host copy: the output thread does, and sends. Results and failures go through one
queue, so they leave in the order of launch (S3-2).
"""

import logging
import os
import queue
import signal
import socket
import threading
from dataclasses import dataclass
from types import FrameType

import msgspec.structs
import numpy as np

from protocol.codec import Decoder, ProtocolError, pack, unpack
from protocol.membership import (
    Assignment,
    GroupMessage,
    Heartbeat,
    InitializeCache,
    LoadFailed,
    LoadProgress,
    Ready,
    Register,
    Shutdown,
)
from protocol.sampling import SamplingParams
from protocol.steps import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequest,
    ReleaseSlots,
    SchedulerOutput,
    StepFault,
    StepMessage,
)
from protocol.transport import Client, HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow
from services.config import WorkerConfig
from services.worker.backends.registry import create
from services.worker.runner import LoadError, ModelRunner, Output

log = logging.getLogger("runahead.worker")

EXIT_MODEL, EXIT_REFUSED, EXIT_LOST, EXIT_FAULT = 3, 4, 5, 6
EPOCH = 1
"""The only one there is until a group can be formed again."""
HEARTBEAT_INTERVAL = 1.0
"""Seconds."""
CONNECT_TIMEOUT = 60.0
"""Seconds to wait for a scheduler."""


@dataclass(frozen=True)
class _Launched:
    step_id: int
    output: Output


class Outputs(threading.Thread):
    """The output thread: waits for host copies, sends results, and a heartbeat when there is nothing else to say."""

    def __init__(self, endpoint: str, name: str) -> None:
        super().__init__(name="outputs", daemon=True)
        self._endpoint, self._name = endpoint, name
        self._queue: queue.SimpleQueue[_Launched | StepFault | None] = queue.SimpleQueue()
        self._last_ended, self._last_step = 0.0, 0
        self.failed = threading.Event()
        self.connected = threading.Event()

    def put(self, item: _Launched | StepFault | None) -> None:
        self._queue.put(item)

    def run(self) -> None:
        client = Client(self._endpoint)
        try:
            client.handshake("worker-results", self._name, CONNECT_TIMEOUT)
            self.connected.set()
            while (message := self._next()) is not None and not self.failed.is_set():
                client.send(message)
                if isinstance(message, StepFault):
                    self.failed.set()
        except (PeerGone, PeerSlow, HandshakeRefused, HandshakeTimeout) as error:
            log.error("results cannot be sent: %s", error)
            self.failed.set()
        finally:
            client.close()

    def _next(self) -> ModelRunnerOutput | StepFault | Heartbeat | None:
        try:
            item = self._queue.get(timeout=HEARTBEAT_INTERVAL)
        except queue.Empty:
            return Heartbeat(EPOCH, self._last_step)
        return self._result(item) if isinstance(item, _Launched) else item

    def _result(self, launched: _Launched) -> ModelRunnerOutput | StepFault:
        try:
            result = launched.output.get()
        except Exception as error:  # whatever a device may raise belongs to its step
            log.exception("step %d failed on its way to the host", launched.step_id)
            return StepFault(EPOCH, launched.step_id, f"{type(error).__name__}: {error}")
        idle = max(0.0, result.started - self._last_ended) if self._last_ended else 0.0
        self._last_ended, self._last_step = result.ended, result.step_id
        return msgspec.structs.replace(result, idle=idle)


class Worker:
    """One worker from registration to its end."""

    def __init__(self, config: WorkerConfig, runner: ModelRunner) -> None:
        self._config = config
        self._runner = runner
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._client = Client(config.scheduler_endpoint)
        self._outputs = Outputs(config.scheduler_endpoint, self._name)
        self._decoder: Decoder[StepMessage | GroupMessage] = Decoder(StepMessage | GroupMessage)
        self._last_step = 0
        self._waiting: SchedulerOutput | None = None
        """A step whose forward pass is launched and whose sampling waits for its grammar."""

    def run(self) -> int:
        """Returns the exit status. Raises: LoadError, PeerGone, PeerSlow, HandshakeRefused, HandshakeTimeout"""
        try:
            self._client.handshake("worker", self._name, CONNECT_TIMEOUT)
            self._client.send(
                Register(self._config.backend, self._config.model, socket.gethostname(), os.getpid())
            )
            self._outputs.start()
            while not self._outputs.failed.is_set():
                frame = self._client.receive(HEARTBEAT_INTERVAL)
                if frame is not None and not self._handle(frame):
                    return 0
            return EXIT_FAULT
        finally:
            self._outputs.put(None)
            if self._outputs.is_alive():
                self._outputs.join(10)
            self._runner.shutdown()
            self._client.close()

    def _handle(self, frame: bytes) -> bool:
        """False: the scheduler sent us away."""
        match self._decoder.decode(frame):
            case Assignment() as assignment:
                self._load(assignment)
            case InitializeCache() as init:
                self._runner.init_kv_cache(init)
                self._canary()
                self._client.send(Ready(EPOCH))
                log.info("ready")
            case Shutdown(reason=reason):
                log.info("leaving: %s", reason)
                return False
            case message:
                self._step(message)
        return True

    def _load(self, assignment: Assignment) -> None:
        try:
            loaded = self._runner.load(
                assignment, lambda phase, fraction: self._client.send(LoadProgress(phase, fraction))
            )
        except LoadError as error:
            self._client.send(LoadFailed(str(error)))
            raise
        self._client.send(loaded)

    def _canary(self) -> None:
        """One step through forward and sampling, and out again, before anybody waits for one."""
        zero, one = pack([0]), pack([1])
        request = NewRequest(0, 1, zero, 1, zero, SamplingParams(max_tokens=1, temperature=0.0))
        self._runner.execute_model(SchedulerOutput(0, 0, zero, one, zero, one, b"\1", [request]))
        self._runner.sample_tokens(None).get()
        self._runner.release(np.zeros(1, np.int32))

    def _step(self, message: StepMessage) -> None:
        step_id = self._last_step
        try:
            match message:
                case SchedulerOutput():
                    step_id = message.step_id
                    if step_id != self._last_step + 1:
                        raise ProtocolError(
                            f"step {step_id} arrived, step {self._last_step + 1} was expected"
                        )
                    self._runner.execute_model(message)
                    self._last_step = step_id
                    self._waiting = message
                    if not message.has_structured_output_requests:
                        self._sample(None)
                case GrammarOutput():
                    self._sample(message)
                case ReleaseSlots():
                    self._runner.release(unpack(message.slots))
        except Exception as error:  # whatever compute may raise takes the place of this step's result
            log.exception("step %d failed", step_id)
            self._outputs.put(StepFault(EPOCH, step_id, f"{type(error).__name__}: {error}"))

    def _sample(self, grammar: GrammarOutput | None) -> None:
        step, self._waiting = self._waiting, None
        if step is None:
            raise ProtocolError("a grammar arrived, but no step waits for one")
        self._outputs.put(_Launched(step.step_id, self._runner.sample_tokens(grammar)))


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)


def run(config: WorkerConfig) -> int:
    """One worker process. Returns the exit status: 0; 3, a model that cannot be served; 4, refused by the scheduler;
    5, the scheduler is gone; 6, a step failed."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        return Worker(config, create(config)).run()
    except LoadError as error:
        log.error("%s", error)
        return EXIT_MODEL
    except HandshakeRefused as error:
        log.error("the scheduler refused this worker: %s", error)
        return EXIT_REFUSED
    except (PeerGone, PeerSlow, HandshakeTimeout, ProtocolError) as error:
        log.error("the scheduler is lost: %s", error)
        return EXIT_LOST
