"""The worker process: sockets, signals and the clock around `Session` and a `ModelRunner`."""

import gc
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import msgspec
import numpy as np
import zmq

from protocol.codec import Decoder, ProtocolError, pack, unpack
from protocol.epochs import number_of
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
from services.process import HANG_FACTOR, NO_ALARM, HangAlarm, collection_paused
from services.units import size_text
from services.worker.backends.registry import create_runner
from services.worker.distributed.rendezvous import address_facing, listen
from services.worker.result_sender import LaunchedStep, ResultSender, fault
from services.worker.runner import LoadError, ModelRunner, OutOfMemory, RanksLost, is_out_of_memory
from services.worker.session import Action, AddMasks, ExecuteStep, Phase, ResendResult, SampleStep, Session

log = logging.getLogger("runahead.worker")

EXIT_MODEL, EXIT_REFUSED, EXIT_LOST, EXIT_FAULT = 3, 4, 5, 6
CONNECT_TIMEOUT = 60.0
"""Seconds to wait for the first scheduler."""
CONNECT_ATTEMPT = 5.0
"""Seconds to wait for an answer from a scheduler before connecting anew."""
RECONNECT_PAUSE = 0.1
"""Seconds between two attempts."""
FAILURE_CHECK_INTERVAL = 1.0
"""Seconds between two checks for a failed output thread while no message arrives."""
PROGRESS_INTERVAL = 0.1
"""Seconds between two messages about loading."""
DRAIN_TIMEOUT = 10.0
"""Seconds that the worker waits for steps in flight when it leaves."""
LINGER_MS = 2000
"""Milliseconds that a closed socket keeps sending its last messages."""


class Worker:
    """One worker from registration to its end."""

    def __init__(self, config: WorkerConfig, runner: ModelRunner, alarm: HangAlarm = NO_ALARM) -> None:
        """`alarm`: set while this worker looks for a scheduler, and by the heartbeat thread while it has one."""
        self._config = config
        self._runner = runner
        self._alarm = alarm
        self._session = Session()
        self._client, self._results = self._make_connection()
        self._listener: socket.socket | None = None
        """The rendezvous that was sent with the registration, until the runner owns it."""
        self._shard: Shard | None = None
        """The shard whose weights are in memory."""
        self._decoder: Decoder[StepMessage | GroupMessage] = Decoder(StepMessage | GroupMessage)
        self._waited = 0.0
        """Seconds spent in receive since the last plan, while no step waited for its grammar."""
        self._received = 0.0
        """When the last message was read: seconds on the monotonic clock."""
        self._step_received = 0.0
        """When the last plan was read."""
        self._request_ids: dict[int, str] = {}
        """Slot -> external id of the request that entered it last."""
        self._next_progress = 0.0
        self.sockets_closed = False
        self._leaving = False

    def leave(self, *_: object) -> None:
        """Signal handler: end the main thread's work, unless the worker is leaving already.

        Raises: SystemExit. Python drops an exception that is raised in a finaliser, so the loop checks as well.
        """
        if not self._leaving:
            self._leaving = True
            raise SystemExit(0)

    def run(self) -> int:
        """Run the worker. Return the exit status: 0 or EXIT_FAULT.

        Raises: LoadError, PeerGone, PeerSlow, HandshakeRefused, HandshakeTimeout
        """
        try:
            self._connect_within(CONNECT_TIMEOUT)
            while (loss := self._serve()) is not None:
                log.warning("the scheduler is lost: %s; waiting for another one, with the weights kept", loss)
                self._reconnect(loss)
        finally:
            self._leaving = True
            self._close_listener()
            self._client.close()
            self.sockets_closed = self._results.close(DRAIN_TIMEOUT)
            if not self.sockets_closed:
                log.error("steps in flight did not end within %.0f s", DRAIN_TIMEOUT)
            self._alarm.cancel()
            self._runner.shutdown()
        faulted = self._session.phase is Phase.FAILED or self._results.failed.is_set()
        return EXIT_FAULT if faulted else 0

    def _serve(self) -> PeerGone | PeerSlow | None:
        """Register, and execute what the scheduler sends. Return its loss, or None when this worker has to end.

        Raises: LoadError, HandshakeRefused
        """
        try:
            self._register()
            while self._session.phase not in (Phase.LEAVING, Phase.FAILED) and not self._leaving:
                frame = self._receive()
                if frame is not None:
                    self._handle(frame)
                if self._results.failed.is_set():
                    self._session.failed()
        except (PeerGone, PeerSlow) as error:
            return error
        if isinstance(self._results.lost, HandshakeRefused):
            raise self._results.lost
        return self._results.lost

    def _make_connection(self) -> tuple[Client, ResultSender]:
        silence = self._config.scheduler_timeout_seconds
        client, results = _client(self._config), _client(self._config)
        return client, ResultSender(results, self._runner.abort, silence, self._alarm)

    def _connect(self, timeout: float) -> None:
        """Raises: HandshakeRefused, HandshakeTimeout, PeerGone"""
        # Unique, and not to be guessed: nobody else can name the second connection like the first one.
        name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._client.handshake("worker", name, timeout)
        self._results.handshake(name, timeout)
        self._results.start()

    def _connect_within(self, seconds: float) -> None:
        """Connect, in attempts of some seconds: a scheduler that was found may be stopped, and another takes its place.

        Raises: HandshakeRefused; HandshakeTimeout, PeerGone or PeerSlow of the last attempt.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._alarm.set()
            try:
                self._connect(CONNECT_ATTEMPT)
                return
            except (HandshakeTimeout, PeerGone, PeerSlow):
                if time.monotonic() >= deadline or not self._renew_connection():
                    raise
                time.sleep(RECONNECT_PAUSE)

    def _renew_connection(self) -> bool:
        """Make new sockets in place of the old ones. Return False if this worker must end instead."""
        self._client.close()
        if self._leaving or not self._results.close(DRAIN_TIMEOUT):
            return False
        self._client, self._results = self._make_connection()
        return True

    def _reconnect(self, loss: PeerGone | PeerSlow) -> None:
        """End the epoch, keep the weights, and connect to the scheduler that takes the place of the lost one.

        Raises: HandshakeRefused; PeerGone and PeerSlow: the loss, if there is no other scheduler in time.
        """
        self._end_epoch()
        if not self._renew_connection():
            raise loss
        self._session.reconnected()
        try:
            self._connect_within(self._config.recovery_timeout_seconds)
        except (HandshakeTimeout, PeerGone, PeerSlow):
            raise loss from None

    def _register(self) -> None:
        """Send this worker's model, its weights in memory, and its rendezvous."""
        host = self._config.host_ip or address_facing(self._config.scheduler_endpoint)
        with self._starting():
            identity, listener = self._runner.identify(), _listen(host)
        self._session.leaves_rows_out = identity.leaves_rows_out
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
                returns=self._session.returns,
                tokenizer=identity.tokenizer,
                leaves_rows_out=identity.leaves_rows_out,
                single_rank=identity.single_rank,
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
        frame = self._client.receive(FAILURE_CHECK_INTERVAL)
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
        try:
            self._act(action)
        except RanksLost as error:  # this worker is healthy; the scheduler ends the epoch
            log.warning("other ranks are lost: %s", error)
            self._session.ranks_lost()
            self._client.send(RankLost(self._session.epoch, str(error)[:MAX_TEXT]))
        except OutOfMemory as error:  # the scheduler ends the epoch, and forms smaller steps in the next one
            log.warning("%s", error)
            self._session.ranks_lost()
            self._client.send(error.message(self._session.epoch))

    def _act(self, action: Action | None) -> None:
        """Raises: RanksLost; OutOfMemory; LoadError, after it was sent to the scheduler."""
        match action:
            case Assignment():
                self._load(action)
            case InitializeCache():
                self._initialize(action)
            case EndEpoch(epoch=epoch, reason=reason):
                log.warning("epoch %d has ended: %s", number_of(epoch), reason)
                self._end_epoch()
                self._register()
            case Ping(sent=sent):
                self._client.send(Pong(sent, self._received, time.monotonic()))
            case Shutdown(reason=reason):
                log.info("leaving: %s", reason or "the scheduler sent no reason")
            case ResendResult():
                self._results.put(action)
            case StepFault():
                log.error("%s", action.error)
                self._results.put(action)
            case AddMasks(grammar):
                self._runner.add_masks(grammar)
            case ExecuteStep() | SampleStep() | ReleaseSlots():
                self._compute(action)

    def _end_epoch(self) -> None:
        """Drop the epoch. A step that is still computed must end soon, which the results' heartbeats check."""
        self._results.waits_for_ranks = self._results.in_step = True
        try:
            self._runner.leave()
        finally:
            self._results.waits_for_ranks = self._results.in_step = False
        self._results.begin_epoch(0, 0)

    # -- start-up ------------------------------------------------------------------------------------------------

    def _load(self, assignment: Assignment) -> None:
        listener, self._listener, self._shard = self._listener, None, None
        self._results.begin_epoch(assignment.epoch, assignment.rank)
        try:
            with self._starting():
                loaded = self._runner.load(assignment, self._progress, listener)
        except LoadError:
            if listener is not None:  # the runner may have failed before it owned the listener
                listener.close()
            raise
        self._shard = assignment.shard
        size = size_text(loaded.num_blocks * loaded.bytes_per_block)
        log.info("loaded: the KV cache has %s in %d blocks", size, loaded.num_blocks)
        self._client.send(msgspec.structs.replace(loaded, epoch=assignment.epoch))
        self._session.loaded()

    def _progress(self, phase: str, fraction: float) -> None:
        now = time.monotonic()
        if now >= self._next_progress or fraction >= 1:
            self._next_progress = now + PROGRESS_INTERVAL
            self._client.send(LoadProgress(phase, min(1.0, max(0.0, fraction)), self._session.epoch))

    def _initialize(self, init: InitializeCache) -> None:
        with self._starting():
            self._runner.init_kv_cache(init)
            self._canary()
        self._client.send(Ready(self._session.epoch))
        self._session.ready()
        log.info("ready: %d KV blocks, context %d", init.num_blocks, init.max_model_len)

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Send errors of the start-up to the scheduler.

        Raises: LoadError, after it was sent; RanksLost, PeerGone and PeerSlow of the body as they are.
        """
        self._results.waits_for_ranks = True
        try:
            yield
        except (PeerGone, PeerSlow, RanksLost):
            raise
        except LoadError as error:
            self._send_load_failed(error)
            raise
        except Exception as error:
            log.exception("the model cannot be served")
            failure = LoadError(f"{type(error).__name__}: {error}")
            self._send_load_failed(failure)
            raise failure from error
        finally:
            self._results.waits_for_ranks = False

    def _send_load_failed(self, error: LoadError) -> None:
        self._client.send(LoadFailed(" ".join(str(error).split())[:MAX_TEXT]))

    def _canary(self) -> None:
        """Run one step through forward pass and sampling before the first real one.

        Afterwards its slot is empty and no step is pending (single pending state). Its generation is 0; requests have
        generations from 1 on.
        """
        zero, one = pack([0]), pack([1])
        request = NewRequest(0, 0, zero, 1, zero, SamplingParams(max_tokens=1, temperature=0.0))
        self._runner.execute_model(SchedulerOutput(0, 0, zero, zero, zero, one, b"\1", [request]))
        self._runner.sample_tokens(None).get()
        self._runner.release(np.zeros(1, np.int32))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _compute(self, action: ExecuteStep | SampleStep | ReleaseSlots) -> None:
        """Raises: RanksLost; OutOfMemory"""
        step_id = self._session.last_step
        self._results.waits_for_ranks = self._results.in_step = True
        try:
            match action:
                case ExecuteStep(step=step):
                    self._step_received = self._received
                    self._request_ids |= {request.slot: request.request_id for request in step.new}
                    self._runner.execute_model(step)
                    if self._session.phase is not Phase.SAMPLING:
                        self._sample(step, None)
                case SampleStep(grammar, step):
                    self._sample(step, grammar)
                case ReleaseSlots(slots=slots):
                    self._runner.release(unpack(slots))
        except RanksLost:
            raise
        except Exception as error:  # any other error is sent instead of the step's result
            if is_out_of_memory(error):
                raise OutOfMemory(step_id, error) from None
            requests = "none" if isinstance(action, ReleaseSlots) else self._requests_of(action.step)
            log.exception("step %d failed; its requests: %s", step_id, requests)
            self._results.put(fault(self._session.epoch, step_id, error))
            self._session.failed()
        finally:
            self._results.waits_for_ranks = self._results.in_step = False

    def _sample(self, step: SchedulerOutput, grammar: GrammarOutput | None) -> None:
        output = self._runner.sample_tokens(grammar)

        def requests() -> str:
            return self._requests_of(step)

        self._results.put(LaunchedStep(step, output, self._step_received, self._waited, requests))
        self._waited = 0.0

    def _requests_of(self, step: SchedulerOutput) -> str:
        """Return the external ids of the requests in a step in flight, for the log."""
        ids = (self._request_ids.get(slot, "") for slot in unpack(step.slots).tolist())
        return ", ".join(request_id or "unnamed" for request_id in ids)


def _listen(host: str) -> socket.socket:
    """Raises: LoadError"""
    try:
        return listen(host)
    except OSError as error:
        raise LoadError(
            f"--host-ip {host}: cannot listen on this address: {error.strerror}; give an address of this machine"
        ) from error
    except ValueError as error:
        raise LoadError(
            f"--host-ip {host}: {error}; give the address of a network of the ranks' own"
        ) from None


def _client(config: WorkerConfig) -> Client:
    client = Client(config.scheduler_endpoint, config.security)
    client.socket.linger = LINGER_MS  # a fault is a worker's last message, and must arrive
    return client


def hide_exits() -> None:
    """Print nothing for a SystemExit that `Worker.leave` raises in a finaliser or in a callback of the compiler. Python
    drops the exception, and the worker's loop ends because of its flag."""

    def show(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not SystemExit:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = show


def _leave(_: int, __: FrameType | None) -> None:
    raise SystemExit(0)


def run(config: WorkerConfig) -> int:
    """Run one worker process. Return its exit status, as `run_worker` does."""
    hide_exits()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        with collection_paused():
            runner = create_runner(config)
        worker = Worker(config, runner, HangAlarm.install(HANG_FACTOR * config.scheduler_timeout_seconds))
    except LoadError as error:  # the backend is not installed
        log.error("%s", error)
        return EXIT_MODEL
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.leave)
    try:
        return run_worker(worker)
    finally:
        if worker.sockets_closed:
            zmq.Context.instance().term()  # waits until the last messages are sent
        gc.freeze()  # otherwise the interpreter scans all objects of torch at its end, which takes most of a second


def run_worker(worker: Worker) -> int:
    """Run a worker from registration to its end. Return the exit status of its process.

    0: it left in order; 3: the model cannot be served; 4: the scheduler refused it; 5: the scheduler is gone; 6: a step
    failed. A process whose last step never ends exits with 7 (result_sender.EXIT_STUCK).
    """
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
