"""What leaves a worker beside its registration: results from the output thread, heartbeats from a thread of their own.

Results, faults and repetitions go through one queue, so they leave in the order of launch (S3-2). The executing thread
never waits for a host copy; the output thread does. Both threads share one connection under a lock, so a heartbeat
leaves although a step takes long. The heartbeat thread also hears there that the epoch has ended, that this worker must
leave, or that nobody is left to say so, when the executing thread hangs in a collective and hears nothing.
"""

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec.structs

from protocol.codec import Decoder, ProtocolError
from protocol.fields import MAX_TEXT
from protocol.membership import EndEpoch, GroupMessage, Heartbeat, RankLost, Shutdown
from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepFault, StepReport, StepResult, StepTimes
from protocol.transport import Client, HandshakeRefused, PeerGone, PeerSlow
from services.worker.runner import Output, RanksLost

log = logging.getLogger("runahead.worker")

HEARTBEAT_INTERVAL = 0.5
"""Seconds."""
LISTEN_INTERVAL = 0.1
"""Seconds between two looks at what the scheduler says on this connection."""
ABORT_GRACE = 8.0
"""Seconds from the end of an epoch until a step of it that has not ended cannot be rescued any more."""
EXIT_STUCK = 7
RESULTS_KEPT = 16
"""A step can be asked for again as long as its result is among the last so many."""


@dataclass(frozen=True)
class Launched:
    """A step whose result is on its way to the host."""

    step: SchedulerOutput
    output: Output
    received: float
    """Seconds on the monotonic clock: the executing thread read the plan."""
    waited: float
    """Seconds that the executing thread waited for this plan with none queued."""

    @property
    def epoch(self) -> int:
        return self.step.epoch

    @property
    def step_id(self) -> int:
        return self.step.step_id


@dataclass(frozen=True)
class Repeat:
    step_id: int


def fault(epoch: int, step_id: int, error: Exception) -> StepFault:
    """Type and text of the exception, no longer than a message may be."""
    return StepFault(epoch, step_id, f"{type(error).__name__}: {error}"[:MAX_TEXT])


class Results:
    """Owns `client` and two threads between `start` and `close`. After a fault nothing more is sent.

    Args:
        abort: interrupts the executing thread, if it waits for other ranks.
    """

    def __init__(self, client: Client, abort: Callable[[], None]) -> None:
        self._client, self._abort = client, abort
        self._lock = threading.Lock()
        """Of the connection."""
        self._state = threading.Lock()
        """Of what belongs to an epoch: it changes at once, or late results would leave traces in the next one."""
        self._queue: queue.SimpleQueue[Launched | StepFault | Repeat | None] = queue.SimpleQueue()
        self._kept: OrderedDict[int, ModelRunnerOutput] = OrderedDict()
        self._last_sampled = 0.0
        self._epoch, self._rank, self._last_step = 0, 0, 0
        self.waits_for_ranks = False
        """The executing thread is where it may have to wait for other ranks: joining them, or in a step."""
        self.in_step = False
        """It is in a step, which must not take much longer than the epoch."""
        self._ended = 0
        """The last epoch of which this connection said that it is over."""
        self._dismissed = False
        """It said that this worker must leave: the scheduler goes next, and its going is no loss."""
        self._group: Decoder[GroupMessage] = Decoder(GroupMessage)
        self._closing = threading.Event()
        self.failed = threading.Event()
        """A fault has left, or nothing can be sent any more: then `lost` says why."""
        self.lost: PeerGone | PeerSlow | HandshakeRefused | None = None
        self._threads = [
            threading.Thread(target=self._send_results, name="outputs", daemon=True),
            threading.Thread(target=self._tend, name="heartbeats", daemon=True),
        ]

    def handshake(self, name: str, timeout: float) -> None:
        """Raises: HandshakeRefused, HandshakeTimeout"""
        self._client.handshake("worker-results", name, timeout)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def enter(self, epoch: int, rank: int) -> None:
        """An epoch begins for this worker; results of the one before are forgotten, those on their way are not sent."""
        with self._state:
            self._epoch, self._rank, self._last_step = epoch, rank, 0
            self._kept.clear()
            self._last_sampled = 0.0

    def put(self, item: Launched | StepFault | Repeat) -> None:
        self._queue.put(item)

    def close(self, timeout: float) -> bool:
        """Sends what is queued, then ends the threads. False: they did not end within `timeout` seconds."""
        self._queue.put(None)
        self._closing.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout)
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            self._client.close()
        return ended

    # -- the output thread ---------------------------------------------------------------------------------------

    def _send_results(self) -> None:
        while not self.failed.is_set() and (item := self._queue.get()) is not None:
            message = self._message(item)
            if message is None:
                continue
            self._send(message)
            if isinstance(message, StepFault):
                self.failed.set()

    def _message(self, item: Launched | StepFault | Repeat) -> StepResult | RankLost | None:
        match item:
            case StepFault():
                return item
            case Launched():
                return self._result(item)
            case Repeat(step_id=step_id) if step_id in self._kept:
                return self._kept[step_id]
            case Repeat(step_id=step_id):
                text = f"step {step_id} is asked for again, but only the last {RESULTS_KEPT} results are kept"
                return StepFault(self._epoch, step_id, text)

    def _result(self, launched: Launched) -> StepResult | RankLost | None:
        try:
            result = launched.output.get()
        except RanksLost as error:
            return RankLost(launched.epoch, str(error)[:MAX_TEXT])
        except Exception as error:  # whatever a device may raise belongs to its step
            log.exception("step %d failed on its way to the host", launched.step_id)
            return fault(launched.epoch, launched.step_id, error) if launched.epoch == self._epoch else None
        with self._state:
            return self._entered(launched, result) if launched.epoch == self._epoch else None

    def _entered(self, launched: Launched, result: ModelRunnerOutput | StepTimes) -> StepResult | None:
        """Complete the times of a step of this epoch, and keep its result for a repetition."""
        self._last_step = launched.step_id
        measured = result if isinstance(result, StepTimes) else result.times
        # The device has nothing to do while both hold: no plan is queued, and the step before has ended.
        pause = measured.forward_began - self._last_sampled if self._last_sampled else 0.0
        self._last_sampled = measured.sampled
        times = msgspec.structs.replace(
            measured,
            received=launched.received,
            sent=time.monotonic(),
            idle=max(0.0, min(pause, launched.waited)),
        )
        if isinstance(result, StepTimes):  # another rank returns the result
            report = StepReport(self._epoch, launched.step_id, self._rank, times)
            return report if launched.step.report_times else None
        result = msgspec.structs.replace(result, times=times)
        self._kept[result.step_id] = result
        if len(self._kept) > RESULTS_KEPT:
            self._kept.popitem(last=False)
        return result

    def _send(self, message: StepResult | Heartbeat | RankLost) -> None:
        try:
            with self._lock:
                self._client.send(message)
        except (PeerGone, PeerSlow) as error:
            self._on_lost(error)

    def _on_lost(self, error: PeerGone | PeerSlow | HandshakeRefused) -> None:
        if not self._dismissed:
            self.lost = error
            self.failed.set()

    # -- the heartbeat thread ------------------------------------------------------------------------------------

    def _tend(self) -> None:
        next_beat = deadline = 0.0
        while not self._closing.wait(LISTEN_INTERVAL):
            if not self.failed.is_set() and not self._dismissed:
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + HEARTBEAT_INTERVAL
                    self._send(self._heartbeat())
                self._listen()
            if not self._wakes():
                deadline = 0.0
                continue
            deadline = deadline or time.monotonic() + ABORT_GRACE
            if self.in_step and time.monotonic() > deadline:
                why = self.lost or f"epoch {self._epoch} is over"
                log.error("%s, but the last step does not end: this process does", why)
                os._exit(EXIT_STUCK)

    def _wakes(self) -> bool:
        """Whether the executing thread waits for nothing, as its epoch has ended or this worker must; then it is woken.

        No epoch can begin meanwhile, or its ranks would be woken too.
        """
        with self._state:
            is_over = self.failed.is_set() or self._dismissed or self._ended >= self._epoch > 0
            if self.waits_for_ranks and is_over:
                self._abort()
                return True
            return False

    def _heartbeat(self) -> Heartbeat:
        with self._state:
            return Heartbeat(self._epoch, self._last_step, self._rank)

    def _listen(self) -> None:
        """Takes what the scheduler says on this connection: that an epoch has ended, or that it stops."""
        try:
            with self._lock:
                frame = self._client.receive_now()
            message = self._group.decode(frame) if frame is not None else None
        except (PeerGone, HandshakeRefused) as error:
            self._on_lost(error)
        except ProtocolError as error:
            log.warning("bad message from the scheduler: %s", error)
        else:
            if isinstance(message, EndEpoch):
                self._ended = message.epoch
            self._dismissed |= isinstance(message, Shutdown)
