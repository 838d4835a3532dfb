"""The worker process: sockets, signals and the clock around `Session` and a `ModelRunner`. It holds no rules."""

import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import msgspec
import numpy as np
import zmq

from protocol.codec import Decoder, ProtocolError, pack, unpack
from protocol.fields import MAX_TEXT
from protocol.membership import (
    Assignment,
    EndEpoch,
    GroupMessage,
    InitializeCache,
    LoadFailed,
    LoadProgress,
    Ping,
    Pong,
    RankLost,
    Ready,
    Register,
    Shard,
    Shutdown,
)
from protocol.sampling import SamplingParams
from protocol.steps import GrammarOutput, NewRequest, ReleaseSlots, SchedulerOutput, StepFault, StepMessage
from protocol.transport import Client, HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow
from services.config import WorkerConfig
from services.worker.backends.registry import create
from services.worker.distributed.rendezvous import facing, listen
from services.worker.results import Launched, Repeat, Results, fault
from services.worker.runner import LoadError, ModelRunner, RanksLost
from services.worker.session import Execute, Phase, Resend, Sample, Session

log = logging.getLogger("runahead.worker")
T = TypeVar("T")

EXIT_MODEL, EXIT_REFUSED, EXIT_LOST, EXIT_FAULT = 3, 4, 5, 6
CONNECT_TIMEOUT = 60.0
"""Seconds to wait for a scheduler."""
LOOK_UP_INTERVAL = 1.0
"""Seconds between two looks at the output thread while nothing arrives."""
PROGRESS_INTERVAL = 0.1
"""Seconds between two messages about loading."""
DRAIN_TIMEOUT = 10.0
"""Seconds that steps in flight have to end when the worker leaves."""
LINGER_MS = 2000
"""What was sent last may take so long to leave."""


class Worker:
    """One worker from registration to its end."""

    def __init__(self, config: WorkerConfig, runner: ModelRunner) -> None:
        self._config = config
        self._runner = runner
        self._session = Session()
        self._client = _client(config.scheduler_endpoint)
        self._results = Results(_client(config.scheduler_endpoint), runner.abort)
        self._listener: socket.socket | None = None
        self._shard: Shard | None = None
        """What is in memory."""
        self._decoder: Decoder[StepMessage | GroupMessage] = Decoder(StepMessage | GroupMessage)
        self._waited = 0.0
        """Seconds spent in receive since the last plan, with no step waiting for its grammar."""
        self._received = 0.0
        """When the last frame was read, and when the last plan: seconds on the monotonic clock."""
        self._step_received = 0.0
        self._request_ids: dict[int, str] = {}
        """The external id of the request that entered each slot last."""
        self._next_progress = 0.0
        self.sockets_closed = False
        self._leaving = False

    def leave(self, *_: object) -> None:
        """The handler of signals: ends what the main thread does, unless it is on its way out already.

        Raises: SystemExit, which is lost where Python lets no exception pass, in a finaliser; so the loop looks too.
        """
        if not self._leaving:
            self._leaving = True
            raise SystemExit(0)

    def run(self) -> int:
        """Returns the exit status: 0 or EXIT_FAULT.

        Raises: LoadError, PeerGone, PeerSlow, HandshakeRefused, HandshakeTimeout
        """
        try:
            self._connect()
            self._register()
            while self._session.phase not in (Phase.LEAVING, Phase.FAILED) and not self._leaving:
                frame = self._receive()
                if frame is not None:
                    self._handle(frame)
                if self._results.failed.is_set():
                    self._session.failed()
        finally:
            self._leaving = True
            self._close_listener()
            self._client.close()
            self.sockets_closed = self._results.close(DRAIN_TIMEOUT)
            if not self.sockets_closed:
                log.error("steps in flight did not end within %.0f s", DRAIN_TIMEOUT)
            self._runner.shutdown()
        if self._results.lost is not None:
            raise self._results.lost
        faulted = self._session.phase is Phase.FAILED or self._results.failed.is_set()
        return EXIT_FAULT if faulted else 0

    def _connect(self) -> None:
        name = f"{socket.gethostname()}:{os.getpid()}"
        self._client.handshake("worker", name, CONNECT_TIMEOUT)
        self._results.handshake(name, CONNECT_TIMEOUT)
        self._results.start()

    def _register(self) -> None:
        """Says what this worker is and holds, and where others can meet it."""
        host = self._config.host_ip or facing(self._config.scheduler_endpoint)
        identity, listener = self._attempt(self._runner.identify), self._attempt(lambda: _listen(host))
        if identity is None or listener is None:
            raise AssertionError("nothing of other ranks is needed to say what a model is")
        self._close_listener()
        self._listener = listener
        self._client.send(
            Register(
                backend=self._config.backend_name,
                model=self._config.model,
                hostname=socket.gethostname(),
                pid=os.getpid(),
                model_hash=identity.model_hash,
                dtype=identity.dtype,
                tensor_parallel_sizes=identity.tensor_parallel_sizes,
                max_pipeline_parallel_size=identity.max_pipeline_parallel_size,
                rendezvous=f"{host}:{listener.getsockname()[1]}",
                epoch=self._session.epoch,
                shard=self._shard,
            )
        )

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _receive(self) -> bytes | None:
        frame = self._client.receive_now()
        if frame is not None:
            self._received = time.monotonic()
            return frame
        began = time.monotonic()
        frame = self._client.receive(LOOK_UP_INTERVAL)
        self._received = time.monotonic()
        if self._session.phase is Phase.SERVING:
            self._waited += self._received - began
        return frame

    def _handle(self, frame: bytes) -> None:
        try:
            action = self._session.on(self._decoder.decode(frame))
        except ProtocolError as error:
            log.warning("bad message from the scheduler: %s", error)
            return
        match action:
            case Assignment():
                self._load(action)
            case InitializeCache():
                self._initialize(action)
            case EndEpoch(epoch=epoch, reason=reason):
                log.warning("epoch %d has ended: %s", epoch, reason)
                self._results.enter(0, 0)
                self._runner.leave()
                self._register()
            case Ping(sent=sent):
                self._client.send(Pong(sent, self._received, time.monotonic()))
            case Shutdown(reason=reason):
                log.info("leaving: %s", reason or "the scheduler says so")
            case Resend(step_id=step_id):
                self._results.put(Repeat(step_id))
            case StepFault():
                log.error("%s", action.error)
                self._results.put(action)
            case Execute() | Sample() | ReleaseSlots():
                self._compute(action)

    # -- start-up ------------------------------------------------------------------------------------------------

    def _load(self, assignment: Assignment) -> None:
        listener, self._listener, self._shard = self._listener, None, None
        self._results.enter(assignment.epoch, assignment.rank)
        loaded = self._attempt(lambda: self._runner.load(assignment, self._progress, listener))
        if loaded is None:
            return
        self._shard = assignment.shard
        log.info("loaded: %d KV blocks of %d bytes", loaded.num_blocks, loaded.bytes_per_block)
        self._client.send(msgspec.structs.replace(loaded, epoch=assignment.epoch))
        self._session.loaded()

    def _progress(self, phase: str, fraction: float) -> None:
        now = time.monotonic()
        if now >= self._next_progress or fraction >= 1:
            self._next_progress = now + PROGRESS_INTERVAL
            self._client.send(LoadProgress(phase, min(1.0, max(0.0, fraction))))

    def _initialize(self, init: InitializeCache) -> None:
        def work() -> bool:
            self._runner.init_kv_cache(init)
            self._canary()
            return True

        if self._attempt(work) is None:
            return
        self._client.send(Ready(self._session.epoch))
        self._session.ready()
        log.info("ready: %d KV blocks, context %d", init.num_blocks, init.max_model_len)

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """None: other ranks were lost meanwhile, and the scheduler was told.

        Raises: LoadError, after the scheduler was told, for whatever keeps this worker from serving.
        """
        self._results.waits_for_ranks = True
        try:
            return work()
        except (PeerGone, PeerSlow):
            raise
        except RanksLost as error:
            self._lost_ranks(error)
            return None
        except LoadError as error:
            failure = error
        except Exception as error:
            log.exception("the model cannot be served")
            failure = LoadError(f"{type(error).__name__}: {error}")
        finally:
            self._results.waits_for_ranks = False
        self._client.send(LoadFailed(" ".join(str(failure).split())[:MAX_TEXT]))
        raise failure

    def _lost_ranks(self, error: RanksLost) -> None:
        """This worker is well, but its epoch is over: it waits to be told."""
        log.warning("other ranks are lost: %s", error)
        self._session.ranks_lost()
        self._client.send(RankLost(self._session.epoch, str(error)[:MAX_TEXT]))

    def _canary(self) -> None:
        """One step through forward and sampling, and out again, before anybody waits for one; leaves no pending
        state and an empty slot (S3-4). Requests have generations from 1 on."""
        zero, one = pack([0]), pack([1])
        request = NewRequest(0, 0, zero, 1, zero, SamplingParams(max_tokens=1, temperature=0.0))
        self._runner.execute_model(SchedulerOutput(0, 0, zero, zero, zero, one, b"\1", [request]))
        self._runner.sample_tokens(None).get()
        self._runner.release(np.zeros(1, np.int32))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _compute(self, action: Execute | Sample | ReleaseSlots) -> None:
        step_id = self._session.last_step
        self._results.waits_for_ranks = self._results.in_step = True
        try:
            match action:
                case Execute(step=step):
                    self._step_received = self._received
                    self._request_ids |= {request.slot: request.request_id for request in step.new}
                    self._runner.execute_model(step)
                    if not step.has_structured_output_requests:
                        self._sample(step, None)
                case Sample(grammar, step):
                    self._sample(step, grammar)
                case ReleaseSlots(slots=slots):
                    self._runner.release(unpack(slots))
        except RanksLost as error:
            self._lost_ranks(error)
        except Exception as error:  # whatever compute may raise takes the place of this step's result
            log.exception("step %d failed; its requests: %s", step_id, self._requests_of(action))
            self._results.put(fault(self._session.epoch, step_id, error))
            self._session.failed()
        finally:
            self._results.waits_for_ranks = self._results.in_step = False

    def _sample(self, step: SchedulerOutput, grammar: GrammarOutput | None) -> None:
        output = self._runner.sample_tokens(grammar)
        self._results.put(Launched(step, output, self._step_received, self._waited))
        self._waited = 0.0

    def _requests_of(self, action: Execute | Sample | ReleaseSlots) -> str:
        """The external ids of the requests in a step, for the log."""
        if isinstance(action, ReleaseSlots):
            return "none"
        ids = (self._request_ids.get(slot, "") for slot in unpack(action.step.slots).tolist())
        return ", ".join(request_id or "unnamed" for request_id in ids)


def _listen(host: str) -> socket.socket:
    """Raises: LoadError"""
    try:
        return listen(host)
    except OSError as error:
        raise LoadError(
            f"--host-ip {host}: ranks cannot meet this one there: {error.strerror}; give an address of this machine"
        ) from error


def _client(endpoint: str) -> Client:
    client = Client(endpoint)
    client.socket.linger = LINGER_MS  # a fault is the last thing a worker says, and must arrive
    return client


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)


def run(config: WorkerConfig) -> int:
    """One worker process. Returns the exit status: 0; 3, a model that cannot be served; 4, refused by the scheduler;
    5, the scheduler is gone; 6, a step failed. 7 is the end of a process that cannot be freed from its last step."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        worker = Worker(config, create(config))
    except LoadError as error:  # the backend itself is missing
        log.error("%s", error)
        return EXIT_MODEL
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.leave)
    try:
        return worker.run()
    except LoadError as error:
        log.error("%s", error)
        return EXIT_MODEL
    except HandshakeRefused as error:
        log.error("the scheduler refused this worker: %s", error)
        return EXIT_REFUSED
    except (PeerGone, PeerSlow, HandshakeTimeout) as error:
        log.error("the scheduler is lost: %s", error)
        return EXIT_LOST
    finally:
        if worker.sockets_closed:
            zmq.Context.instance().term()  # waits until the last words have left
        gc.freeze()  # the interpreter would look through all of torch before it ends, for most of a second
