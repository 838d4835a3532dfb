"""A scripted scheduler on a real socket: it sends what a test gives it and keeps the worker's messages."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from protocol.codec import Decoder
from protocol.handshake import Hello
from protocol.membership import (
    Assignment,
    EndEpoch,
    Heartbeat,
    InitializeCache,
    Loaded,
    LoadProgress,
    Ping,
    Ready,
    Register,
    Shutdown,
    WorkerMessage,
)
from protocol.steps import ModelRunnerOutput, StepFault, StepResult
from protocol.transport import PeerGone, Server
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.runner import ModelRunner
from services.worker.service import Worker, run_worker
from tests.preloaded import ERRORS, PreloadedProcess
from tests.unit.worker.plans import BLOCK, BLOCKS, CONTEXT, SLOTS, VOCAB

PATIENCE = 60.0
EPOCH = 1
SIM = {"backend": "sim", "sim_vocab_size": VOCAB, "sim_step_ms": 0.0, "sim_prefill_token_us": 0.0}


HANG = (
    "import services.worker.result_sender as result_sender, time\n"
    "result_sender.ABORT_GRACE = 0.5\n"
    "from services.worker.backends.sim.runner import SimRunner\n"
    "execute = SimRunner.execute_model\n"
    "def hang(self, step):\n"
    "    execute(self, step)\n"
    "    while step.step_id: time.sleep(3600)\n"
    "SimRunner.execute_model = hang\n"
)
"""Code that makes the forward pass hang, so that no closed connection ends it."""
HANG_RESULT = (
    "import services.worker.result_sender as result_sender, time\n"
    "result_sender.ABORT_GRACE = 0.5\n"
    "from services.worker.backends.sim.output.step_output import StepOutput\n"
    "get = StepOutput.get\n"
    "StepOutput.get = lambda self: time.sleep(3600 if self.step.step_id else 0) or get(self)\n"
)
"""Code that makes the thread that sends results hang, while the one that executes goes on."""


class ScriptedWorkerServer:
    """The scheduler's end of one worker's connections."""

    def __init__(self, endpoint: str, roles: tuple[str, ...] = ("worker", "worker-results")) -> None:
        self._server = Server(endpoint, roles)
        self._decoder: Decoder[msgspec.Struct] = Decoder(WorkerMessage | StepResult)
        self.worker = self.results_peer = b""
        self.received: list[msgspec.Struct] = []
        """Every message but heartbeats, in order of arrival."""
        self.heartbeats: list[Heartbeat] = []

    def next_message(self) -> msgspec.Struct:
        """Return the next message that is not a heartbeat."""
        while True:
            peer, frame = self._next_frame()
            if isinstance(frame, Hello):
                if frame.role == "worker-results":
                    self.results_peer = peer
                continue
            message = self._decoder.decode(frame)
            if isinstance(message, Heartbeat):
                self.heartbeats.append(message)
                continue
            if isinstance(message, Register):
                self.worker = peer
            self.received.append(message)
            return message

    def _next_frame(self) -> tuple[bytes, bytes | Hello]:
        while (received := self._server.receive()) is None:
            assert self._server.socket.poll(1000 * PATIENCE), "the worker sends nothing"
        return received

    def wait_refused(self) -> None:
        """Poll once; a worker whose handshake is refused sends nothing more."""
        self._server.socket.poll(50)
        assert self._server.receive() is None

    def send(self, *messages: msgspec.Struct) -> None:
        for message in messages:
            self._server.send(self.worker, message)

    def send_while_there(self, *messages: msgspec.Struct) -> None:
        """Send messages of which one ends the worker: it may be gone before the later ones are sent."""
        with suppress(PeerGone):
            self.send(*messages)

    def send_raw(self, frame: bytes) -> None:
        self._server.socket.send_multipart((self.worker, frame))

    def registered(self) -> Register:
        message = self.next_message()
        assert isinstance(message, Register)
        return message

    def assign(self, epoch: int = EPOCH) -> None:
        self.send(Assignment(epoch, 0, 1, BLOCK, SLOTS, 512, CONTEXT))

    def load(self, epoch: int = EPOCH) -> Loaded:
        """Take the worker from its registration to Loaded. Late results of the epoch before may arrive."""
        self.assign(epoch)
        while not isinstance(loaded := self.next_message(), Loaded):
            assert isinstance(loaded, LoadProgress | ModelRunnerOutput)
            assert loaded.epoch == (epoch if isinstance(loaded, LoadProgress) else epoch - 1)
        assert loaded.epoch == epoch
        return loaded

    def initialize(self, epoch: int = EPOCH) -> None:
        """Take the worker from Loaded to Ready."""
        self.send(InitializeCache(BLOCKS, CONTEXT))
        assert self.next_message() == Ready(epoch)

    def serve(self, epoch: int = EPOCH) -> Loaded:
        """Take the worker from its registration to Ready."""
        self.registered()
        loaded = self.load(epoch)
        self.initialize(epoch)
        return loaded

    def end(self, epoch: int) -> None:
        """End an epoch on both connections, as a scheduler does."""
        for peer in (self.results_peer, self.worker):
            self._server.send(peer, EndEpoch(epoch, "the script ends it"))

    def stop(self) -> None:
        """Send a shutdown on both connections, as a scheduler does, and close at once."""
        for peer in (self.results_peer, self.worker):
            self._server.send(peer, Shutdown("the script ends"))
        self._server.close(int(1000 * PATIENCE))

    def end_on_results(self, epoch: int) -> None:
        """End an epoch on the connection for results alone, as if the other one forwarded nothing."""
        self._server.send(self.results_peer, EndEpoch(epoch, "the script ends it"))

    def beat(self, number: int = 0) -> None:
        """Send a sign of life; the worker counts the silence after it."""
        self._server.send(self.results_peer, Ping(number=number))

    def refuse(self, reason: str) -> None:
        self._server.refuse(self.worker, reason)

    def results(self, count: int) -> list[ModelRunnerOutput | StepFault]:
        results = [self.next_message() for _ in range(count)]
        assert all(isinstance(result, ModelRunnerOutput | StepFault) for result in results)
        return results  # type: ignore[return-value]

    def wait_heartbeat(self) -> Heartbeat:
        """Return the next heartbeat; no other message may arrive."""
        _, frame = self._next_frame()
        assert not isinstance(frame, Hello)
        message = self._decoder.decode(frame)
        assert isinstance(message, Heartbeat)
        self.heartbeats.append(message)
        return message

    def close(self) -> None:
        self._server.close()


def worker_config(directory: Path, **values: object) -> WorkerConfig:
    """Return the configuration of a simulated worker whose scheduler is at `directory`, and may be silent."""
    scheduler = {"scheduler_endpoint": f"ipc://{directory}/w", "scheduler_timeout_seconds": 600}
    return WorkerConfig.model_validate(SIM | scheduler | values)


class WorkerThread:
    """A worker in a thread of this process, on real sockets: for tests that need no process of its own."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._status = run_worker(self.worker)
        except SystemExit as end:
            self._status = end.code

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def exit_status(self) -> int:
        """Wait for the worker to end by itself. Return the exit status that its process would have."""
        self._thread.join(PATIENCE)
        assert self._status is not None, "the worker has not ended"
        return self._status


def checking_runner(config: WorkerConfig) -> ModelRunner:
    return SimRunner(config, full_check=True)


@contextmanager
def worker_thread(
    scheduler: ScriptedWorkerServer,
    directory: Path,
    make_runner: Callable[[WorkerConfig], ModelRunner] = checking_runner,
    **values: object,
) -> Iterator[WorkerThread]:
    """Run a worker in a thread. If it has not ended by itself, it is shut down at the end, and leaves in order.
    `values` are settings of the worker."""
    config = worker_config(directory, **values)
    thread = WorkerThread(Worker(config, make_runner(config)))
    try:
        yield thread
    finally:
        is_running = thread.is_running
        scheduler.send_while_there(Shutdown())
        status = thread.exit_status()
    assert status == 0 or not is_running


@contextmanager
def worker_process(directory: Path, before: str = "", **values: object) -> Iterator[PreloadedProcess]:
    """Run a real worker process, which is killed at the end. `before` is code that it runs first."""
    code = (
        f"{before}import logging, sys; logging.basicConfig(level=logging.INFO)\n"
        "from services.config import WorkerConfig\n"
        "from services.worker.service import run\n"
        "sys.exit(run(WorkerConfig.model_validate_json(sys.argv[1])))"
    )
    config = worker_config(directory, **values)
    process = PreloadedProcess(code, config.model_dump_json(), pipes=(ERRORS,))
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def exit_status(process: PreloadedProcess) -> tuple[int, str]:
    """Wait for the worker to end by itself. Return its exit status and its log."""
    text = process.stderr.read()
    return process.wait(PATIENCE), text
