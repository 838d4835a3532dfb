"""The worker process: sockets, signals and the clock around `Session` and a `ModelRunner`."""

import gc
import logging
import signal
import sys
import time

import zmq

from protocol.codec import Decoder, ProtocolError
from protocol.epochs import number_of
from protocol.fields import MAX_TEXT
from protocol.membership import Assignment, EndEpoch, GroupMessage, InitializeCache, Ping, Pong, RankLost, Shutdown
from protocol.steps import StepFault, StepMessage
from protocol.transport import HandshakeRefused, HandshakeTimeout, PeerGone, PeerSlow
from services.config import WorkerConfig
from services.process import HANG_FACTOR, NO_ALARM, HangAlarm, collection_paused, start_log
from services.worker.backends.registry import create_runner
from services.worker.runner import LoadError, ModelRunner, OutOfMemory, RanksLost
from services.worker.scheduler_link import DRAIN_TIMEOUT, SchedulerLink
from services.worker.session import Action, Phase, Session
from services.worker.start_up import StartUp
from services.worker.step_execution import StepExecution
from services.worker.tiers.offload import MakeTiers, Offload, tiers_of

log = logging.getLogger("runahead.worker")

EXIT_MODEL, EXIT_REFUSED, EXIT_LOST, EXIT_FAULT = 3, 4, 5, 6
CONNECT_TIMEOUT = 60.0
"""Seconds to wait for the first scheduler."""
FAILURE_CHECK_INTERVAL = 1.0
"""Seconds between two checks for a failed output thread while no message arrives."""


class Worker:
    """One worker from registration to its end."""

    def __init__(
        self, config: WorkerConfig, runner: ModelRunner, alarm: HangAlarm = NO_ALARM, make_tiers: MakeTiers = tiers_of
    ) -> None:
        """
        Args:
            alarm: set while this worker looks for a scheduler, and by the heartbeat thread while it has one.
            make_tiers: other tiers than the configured ones, for tests.
        """
        self._config = config
        self._runner = runner
        self._alarm = alarm
        self._session = Session()
        self._link = SchedulerLink(config, runner, alarm)
        self._offload = Offload(config, lambda answer: self._link.results.send_beside(answer), make_tiers)
        self._start_up = StartUp(config, runner, self._session, self._link, self._offload)
        self._steps = StepExecution(runner, self._session, self._link, self._offload)
        self._decoder: Decoder[StepMessage | GroupMessage] = Decoder(StepMessage | GroupMessage)
        self._received = 0.0
        """When the last message was read: seconds on the monotonic clock."""
        self.sockets_closed = False

    def leave(self, *_: object) -> None:
        """Signal handler. A rank that serves goes on until the scheduler sends it away: a scheduler that is stopped too
        lets open requests finish. A second signal, or one at another time, ends the main thread's work.

        Raises: SystemExit. Python drops an exception that is raised in a finaliser, so the loop checks as well.
        """
        was_stopped, self._link.results.is_stopped = self._link.results.is_stopped, True
        if not self._link.is_closing and (was_stopped or self._session.phase is not Phase.SERVING):
            self._link.is_closing = True
            raise SystemExit(0)

    def run(self) -> int:
        """Run the worker. Return the exit status: 0 or EXIT_FAULT.

        Raises: LoadError, PeerGone, PeerSlow, HandshakeRefused, HandshakeTimeout
        """
        start_log.debug("connecting to the scheduler")
        try:
            self._link.connect_within(CONNECT_TIMEOUT)
            while (loss := self._serve()) is not None:
                self._session.reconnected()  # from here on, a signal ends this worker at once
                if self._link.results.is_stopped:
                    break
                log.warning("the scheduler is lost: %s; waiting for another one, with the weights kept", loss)
                self._reconnect(loss)
        finally:
            self._link.is_closing = True
            self._start_up.close_listener()
            self._link.results.leave(is_dismissed=self._session.phase is Phase.LEAVING)
            self._runner.end_masks()  # this thread reads none any more
            self._offload.end(leaves=True)
            self.sockets_closed = self._link.close()
            if not self.sockets_closed:
                log.error("steps in flight did not end within %.0f s", DRAIN_TIMEOUT)
            self._alarm.cancel()
            self._runner.shutdown()
        sender = self._link.results
        faulted = self._session.phase is Phase.FAILED or (sender.failed.is_set() and sender.lost is None)
        return EXIT_FAULT if faulted else 0

    def _serve(self) -> PeerGone | PeerSlow | None:
        """Register, and execute what the scheduler sends. Return its loss, or None when this worker has to end.

        Raises: LoadError, HandshakeRefused
        """
        try:
            self._start_up.register()
            while self._session.phase not in (Phase.LEAVING, Phase.FAILED) and not self._link.is_closing:
                self._turn()
                if self._link.results.failed.is_set():
                    self._session.failed()
        except (PeerGone, PeerSlow) as error:
            return error
        if isinstance(self._link.results.lost, HandshakeRefused):
            raise self._link.results.lost
        return self._link.results.lost

    def _reconnect(self, loss: PeerGone | PeerSlow) -> None:
        """End the epoch, keep the weights, and connect to the scheduler that takes the place of the lost one.

        Raises: HandshakeRefused; PeerGone and PeerSlow: the loss, if there is no other scheduler in time.
        """
        self._end_epoch()
        if not self._link.renew():
            raise loss
        try:
            self._link.connect_within(self._config.recovery_timeout_seconds)
        except (HandshakeTimeout, PeerGone, PeerSlow):
            raise loss from None

    def _turn(self) -> None:
        """Handle the next message, or continue steps that wait for masks. Losses are sent to the scheduler: this worker
        ignores everything up to the epoch's end."""
        try:
            if (frame := self._receive()) is not None:
                self._handle(frame)
        except RanksLost as error:  # this worker is healthy; the scheduler ends the epoch, and says whether by a fault
            log.info("other ranks are lost: %s", error)
            self._session.ranks_lost()
            self._link.client.send(RankLost(self._session.epoch, str(error)[:MAX_TEXT]))
        except OutOfMemory as error:  # the scheduler ends the epoch, and forms smaller steps in the next one
            log.warning("%s", error)
            self._session.ranks_lost()
            self._link.client.send(error.message(self._session.epoch))

    def _receive(self) -> bytes | None:
        """Return the next frame. None: none came in time, or a step that waited was sampled instead of waiting.

        Raises: as `StepExecution.act`
        """
        frame = self._link.client.receive_now()
        if frame is not None:
            self._received = time.monotonic()
            return frame
        if self._steps.advance():
            return None
        began = time.monotonic()
        frame = self._link.client.receive(min(FAILURE_CHECK_INTERVAL, self._steps.seconds_left))
        self._received = time.monotonic()
        self._steps.on_wait(self._received - began)
        return frame

    def _handle(self, frame: bytes) -> None:
        try:
            action = self._session.on(self._decoder.decode(frame))
        except ProtocolError as error:
            log.warning("bad message from the scheduler: %s", error)
            return
        self._act(action)

    def _act(self, action: Action | None) -> None:
        """Raises: RanksLost; OutOfMemory; LoadError, after it was sent to the scheduler."""
        match action:
            case Assignment():
                self._start_up.load(action)
            case InitializeCache():
                self._start_up.initialize(action)
            case EndEpoch() if self._link.results.is_stopped:
                self._link.is_closing = True
            case EndEpoch(epoch=epoch, reason=reason, is_fault=is_fault):
                level = logging.WARNING if is_fault else logging.INFO
                log.log(level, "epoch %d has ended: %s", number_of(epoch), reason)
                self._end_epoch()
                self._start_up.register()
            case Ping(sent=sent, number=number):
                tiers = self._offload.report() if number else []
                self._link.client.send(Pong(sent, self._received, time.monotonic(), number, tiers))
            case Shutdown(reason=reason):
                log.info("leaving: %s", reason or "the scheduler sent no reason")
            case StepFault():
                log.error("%s", action.error)
                self._link.results.put(action)
            case None:
                pass
            case _:
                self._steps.act(action, self._received)

    def _end_epoch(self) -> None:
        """Drop the epoch. A step that is still computed must end soon, which the results' heartbeats check."""
        self._steps.drop()
        self._offload.end()
        with self._link.results.may_wait_for_ranks(in_step=True):
            self._runner.leave()
        self._link.results.begin_epoch(0, 0)


def hide_exits() -> None:
    """Print nothing for a SystemExit that `Worker.leave` raises in a finaliser or in a callback of the compiler. Python
    drops the exception, and the worker's loop ends because of its flag. Nor for the OSError, of no object, with which
    Python reports a signal that arrived while its handler was replaced: the worker had left already."""
    other = sys.unraisablehook  # that of kernels, if there are any already

    def show(unraisable: "sys.UnraisableHookArgs") -> None:
        is_late_signal = unraisable.exc_type is OSError and unraisable.object is None
        if unraisable.exc_type is not SystemExit and not is_late_signal:
            other(unraisable)

    sys.unraisablehook = show


def run(config: WorkerConfig) -> int:
    """Run one worker process. Return its exit status, as `run_worker` does."""
    hide_exits()
    start_log.debug("importing the %s backend", config.backend)
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
