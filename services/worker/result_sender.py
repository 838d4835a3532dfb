"""The connection for results: one thread sends results, another one heartbeats.

Results, faults and repeated results are sent in the order of launch (step order; docs/invariants.md): through one
queue, whose thread waits for host copies. While the queue is empty, the executing thread itself sends what waits for
nothing. A thread that computes in many short calls outside of Python's lock takes the lock back at once after each of
them, and another thread that wants it to send a result delays both. The threads share the connection under a lock, so
heartbeats are sent during a long step. The heartbeat thread also receives the end of the epoch, a shutdown, and the
loss of the scheduler, because the executing thread receives nothing while it hangs in a collective.
"""

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec.structs

from protocol.codec import Decoder, ProtocolError
from protocol.epochs import number_of
from protocol.fields import MAX_TEXT
from protocol.membership import EndEpoch, GroupMessage, Heartbeat, Ping, RankLost, Shutdown
from protocol.silence import SilenceWatch
from protocol.steps import (
    BlocksLoaded,
    ModelRunnerOutput,
    SchedulerOutput,
    StepFault,
    StepReport,
    StepResult,
    StepTimes,
)
from protocol.transport import Client, HandshakeRefused, PeerGone, PeerSlow
from services.process import NO_ALARM, HangAlarm, IdleWatch, name_this_thread, processor_seconds
from services.worker.kv_memory import BlockNames
from services.worker.runner import OutOfMemory, Output, RanksLost, is_out_of_memory
from services.worker.session import ResendResult

log = logging.getLogger("runahead.worker")

HEARTBEAT_INTERVAL = 0.5
"""Seconds between two heartbeats."""
CONTROL_INTERVAL = 0.1
"""Seconds between two reads of this connection."""
ABORT_GRACE = 8.0
"""Seconds from the end of an epoch until a step of it that has not ended is considered stuck, or the connection for
plans on which the end has not arrived."""
EXIT_STUCK = 7
RESULTS_KEPT = 16
"""Number of latest results that are kept to be sent again."""


@dataclass(frozen=True)
class LaunchedStep:
    """A step whose result is on its way to the host."""

    step: SchedulerOutput
    output: Output
    received: float
    """Time at which the executing thread read the plan, seconds on the monotonic clock."""
    waited: float
    """Seconds that the executing thread waited for this plan while no plan was queued."""
    requests: Callable[[], str] = str
    """Return the external ids of the step's requests, for the log."""
    names: BlockNames | None = None
    """Names of the blocks that the step writes."""

    def seconds_with_plan(self, since: float, until: float) -> float:
        """Return the seconds between two times without those in which the executing thread waited for this plan. A
        worker without requests waits for a plan, so idleness is not counted."""
        waited = self.received - max(since, self.received - self.waited)
        return max(0.0, until - since - max(0.0, waited))


def fault(epoch: int, step_id: int, error: Exception) -> StepFault:
    """Return a fault with the exception's type and text, cut to the length that a message may have."""
    return StepFault(epoch, step_id, f"{type(error).__name__}: {error}"[:MAX_TEXT])


class ResultSender:
    """Sends results and heartbeats. It owns `client`, and two threads from `start` to `close`.

    After a fault it sends nothing more.

    Args:
        abort: ends the executing thread's wait for other ranks with RanksLost.
        silence: seconds without a sign of life after which the scheduler is lost.
        alarm: set by the heartbeat thread.
    """

    def __init__(self, client: Client, abort: Callable[[], None], silence: float, alarm: HangAlarm = NO_ALARM) -> None:
        self._client, self._abort, self._alarm = client, abort, alarm
        self._silence = SilenceWatch(silence)
        self._connection = threading.Lock()
        """Protects the connection."""
        self._state = threading.Lock()
        """Protects the attributes of an epoch, which change together: a late result must not enter the next epoch."""
        self._queue: queue.SimpleQueue[LaunchedStep | StepFault | ResendResult | None] = queue.SimpleQueue()
        self._num_queued = 0
        """Items that were queued and are not sent yet; under `_state`."""
        self._kept: OrderedDict[int, ModelRunnerOutput] = OrderedDict()
        self._last_sampled = self._last_forward = 0.0
        self._epoch, self._rank, self._last_step = 0, 0, 0
        self._waits_for_ranks = False
        """True while the executing thread may wait for other ranks: when it joins them, and in a step."""
        self._in_step = False
        """True while the executing thread is in a step, which must end soon after its epoch."""
        self._idle = IdleWatch()
        self._answers = 0
        """Last sign of life of the scheduler that has arrived on this connection."""
        self._computed_epoch = 0
        """Not 0 while a result of this epoch is fetched: the output thread waits for a step that another thread of the
        runner computes. Like `_in_step`, and that thread may wait for other ranks."""
        self._ended_epoch = 0
        """The last epoch whose end was received on this connection."""
        self.is_dismissed = False
        """True after a shutdown was received: the scheduler closes the connection next, and that is not a loss."""
        self._group: Decoder[GroupMessage] = Decoder(GroupMessage)
        self.is_stopped = False
        """A signal has stopped the worker. Heartbeats report it, and the scheduler sends a shutdown."""
        self._leaves = False
        """True: the worker leaves, and steps that end without a result are not reported."""
        self._closing = threading.Event()
        self.failed = threading.Event()
        """Set after a fault was sent, or when nothing can be sent any more; then `lost` has the reason."""
        self.lost: PeerGone | PeerSlow | HandshakeRefused | None = None
        self._heartbeats = threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True)
        outputs = threading.Thread(target=self._send_results, name="outputs", daemon=True)
        self._threads = [outputs, self._heartbeats]

    def handshake(self, name: str, timeout: float) -> None:
        """Raises: HandshakeRefused, HandshakeTimeout, PeerGone"""
        self._client.handshake("worker-results", name, timeout)

    def start(self) -> None:
        self._silence.heard()  # the handshake was answered
        for thread in self._threads:
            thread.start()

    def begin_epoch(self, epoch: int, rank: int) -> None:
        """Drop the kept results of the previous epoch; those that still arrive are not sent."""
        with self._state:
            self._epoch, self._rank, self._last_step = epoch, rank, 0
            self._kept.clear()
            self._last_sampled = self._last_forward = 0.0

    def put(self, item: LaunchedStep | StepFault | ResendResult) -> None:
        """Send a result, a fault or a repetition; queue it if it waits for a host copy or for one before it. For the
        executing thread."""
        with self._state:
            waits = self._num_queued > 0 or (isinstance(item, LaunchedStep) and not item.output.is_done)
            self._num_queued += waits
        if waits:
            self._queue.put(item)
        else:
            self._deliver(item)

    def send_beside(self, message: BlocksLoaded) -> None:
        """Send a message beside the results. For any thread; nothing is sent before `start`, as a load may end while
        this worker looks for another scheduler, nor once this is closed."""
        with self._connection:
            if not self._heartbeats.is_alive() or self._closing.is_set() or self.failed.is_set():
                return
            try:
                self._client.send(message)
            except (PeerGone, PeerSlow) as error:
                self._on_lost(error)

    @contextmanager
    def may_wait_for_ranks(self, in_step: bool = False) -> Iterator[None]:
        """The executing thread may wait for other ranks in the body: a wait that has become useless is aborted.

        Args:
            in_step: the body must end soon after the epoch has ended; loading weights may take longer.
        """
        self._waits_for_ranks, self._in_step = True, in_step
        try:
            yield
        finally:
            self._waits_for_ranks = self._in_step = False

    def leave(self, is_dismissed: bool = False) -> None:
        """Report no step any more that ends without a result: the end of the wait for its masks would reach the
        scheduler as the loss of other ranks, before the fault behind it. A signal is reported at once,
        unless the scheduler has dismissed this worker."""
        self._leaves = True
        if self.is_stopped and not is_dismissed and self._heartbeats.is_alive() and not self.failed.is_set():
            self._beat()

    def close(self, timeout: float) -> bool:
        """Send the queued messages, then end the threads and close the connection.

        Return False if the threads did not end within `timeout` seconds.
        """
        self._leaves = True
        self._queue.put(None)
        # The heartbeat thread is the second one: until the first has ended, it aborts waits that are useless
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout)
            self._closing.set()
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:
            with self._connection:
                self._client.close()
        return ended

    # -- sending -------------------------------------------------------------------------------------------------

    def _send_results(self) -> None:
        name_this_thread()
        while not self.failed.is_set() and (item := self._queue.get()) is not None:
            self._deliver(item)
            with self._state:
                self._num_queued -= 1

    def _deliver(self, item: LaunchedStep | StepFault | ResendResult) -> None:
        """Send an item after all items before it."""
        message = None if self.failed.is_set() else self._message(item)
        if message is not None:
            self._send(message)
        if isinstance(message, StepFault):
            self.failed.set()

    def _message(self, item: LaunchedStep | StepFault | ResendResult) -> StepResult | RankLost | None:
        match item:
            case StepFault():
                return item
            case LaunchedStep():
                return self._result(item)
            case ResendResult(step_id=step_id) if step_id in self._kept:
                return self._kept[step_id]
            case ResendResult(step_id=step_id):
                text = f"step {step_id} was sent again, but only the last {RESULTS_KEPT} results are kept"
                return StepFault(self._epoch, step_id, text)

    def _result(self, launched: LaunchedStep) -> StepResult | RankLost | None:
        epoch, step_id = launched.step.epoch, launched.step.step_id
        self._computed_epoch = epoch
        try:
            result = launched.output.get()
        except RanksLost as error:
            return None if self._leaves else RankLost(epoch, str(error)[:MAX_TEXT])
        except Exception as error:  # any error of the device is reported as a fault of its step
            if is_out_of_memory(error):
                return OutOfMemory(step_id, error).message(epoch)
            log.exception("step %d failed; its requests: %s", step_id, launched.requests())
            return fault(epoch, step_id, error) if epoch == self._epoch else None
        finally:
            self._computed_epoch = 0
        if launched.names is not None:
            launched.names.executed = step_id
        with self._state:
            return self._completed(launched, result) if epoch == self._epoch else None

    def _completed(self, launched: LaunchedStep, result: ModelRunnerOutput | StepTimes) -> StepResult | None:
        """Complete the times of a step of this epoch, and keep its result in case it must be sent again."""
        self._last_step = launched.step.step_id
        measured = result if isinstance(result, StepTimes) else result.times
        # The device is idle while both hold: no plan is queued, and the step before has ended.
        pause = measured.forward_began - self._last_sampled if self._last_sampled else 0.0
        gap = prepared_wait = 0.0
        if self._last_forward:
            gap = launched.seconds_with_plan(self._last_forward, measured.forward_began)
        if measured.prepared_wait:
            since = measured.prepared - measured.prepared_wait
            prepared_wait = launched.seconds_with_plan(since, measured.prepared)
        self._last_sampled, self._last_forward = measured.sampled, measured.forward_ended
        times = msgspec.structs.replace(
            measured,
            received=launched.received,
            sent=time.monotonic(),
            idle=max(0.0, min(pause, launched.waited)),
            plan_wait=launched.waited,
            prepared_wait=prepared_wait,
            forward_gap=gap,
        )
        if isinstance(result, StepTimes):  # another rank returns the result
            report = StepReport(self._epoch, launched.step.step_id, self._rank, times)
            return report if launched.step.report_times else None
        result = msgspec.structs.replace(result, times=times)
        self._kept[result.step_id] = result
        if len(self._kept) > RESULTS_KEPT:
            self._kept.popitem(last=False)
        return result

    def _send(self, message: StepResult | Heartbeat | RankLost) -> None:
        try:
            with self._connection:
                self._client.send(message)
        except (PeerGone, PeerSlow) as error:
            self._on_lost(error)

    def _on_lost(self, error: PeerGone | PeerSlow | HandshakeRefused) -> None:
        if not self.is_dismissed:
            self.lost = error
            self.failed.set()

    def _beat(self, work: float = 0.0) -> None:
        with self._state:
            beat = Heartbeat(self._epoch, self._last_step, work, self._answers, self.is_stopped)
        self._send(beat)

    # -- the heartbeat thread ------------------------------------------------------------------------------------

    def _send_heartbeats(self) -> None:
        next_beat = limit = 0.0
        reported = False
        while not self._closing.wait(CONTROL_INTERVAL):
            self._alarm.set()
            if not self.failed.is_set() and not self.is_dismissed:
                if time.monotonic() >= next_beat or reported != self.is_stopped:
                    next_beat, reported = time.monotonic() + HEARTBEAT_INTERVAL, self.is_stopped
                    self._beat(self._measure_work())
                self._receive()
                if (seconds := self._silence.check(time.monotonic())) is not None:
                    self._on_lost(PeerGone(f"it was silent for {seconds:.1f} s"))
            limit = self._enforce_end(limit)

    def _enforce_end(self, limit: float) -> float:
        """When the epoch has ended or the worker must leave, end the executing thread's waits, and this process if that
        thread does not go on, or a step of an earlier epoch does not end: results would wait behind it for ever.

        Args:
            limit: when it must have gone on, monotonic seconds; 0.0: no limit is set yet.

        Returns: the limit for the next call.
        """
        waits = self._abort_useless_wait() or self._computed_epoch not in (0, self._epoch)
        if not waits and not self._epoch_has_ended:
            return 0.0
        now = time.monotonic()
        limit = limit or now + ABORT_GRACE
        if not waits:  # the executing thread only has to read the end of the epoch
            if now > limit:
                self._on_lost(PeerGone("it ended the epoch, but sends nothing on the connection for plans"))
            return limit
        self._measure_work()  # otherwise heartbeats do, which may have ended with the connection
        in_step = self._in_step or self._computed_epoch
        if now > limit and (in_step or self._idle.seconds(now) > ABORT_GRACE):
            why = self.lost or f"epoch {number_of(self._computed_epoch or self._epoch)} is over"
            what = "the last step" if in_step else "loading"
            log.error("%s, but %s does not end: this process exits", why, what)
            os._exit(EXIT_STUCK)
        return limit

    @property
    def _epoch_has_ended(self) -> bool:
        """Return whether the end of the epoch was received here, and not yet on the connection for plans."""
        return self._ended_epoch >= self._epoch > 0

    def _abort_useless_wait(self) -> bool:
        """Abort the executing thread's wait for other ranks if the epoch has ended or the worker must leave.

        Return True if it was aborted. Under the lock the next epoch cannot begin; otherwise its ranks would be
        aborted too.
        """
        with self._state:
            is_over = self.failed.is_set() or self.is_dismissed or self._epoch_has_ended
            if (self._waits_for_ranks or self._computed_epoch) and is_over:
                self._abort()
                return True
            return False

    def _measure_work(self) -> float:
        """Return the seconds of processor time while this worker starts; 0.0 otherwise."""
        starts = self._waits_for_ranks and not self._in_step
        work = processor_seconds() if starts else 0.0
        self._idle.observe(work, time.monotonic())
        return work

    def _receive(self) -> None:
        """Read the scheduler's messages on this connection: the end of an epoch, or a shutdown."""
        try:
            while (frame := self._next_frame()) is not None:
                try:
                    message = self._group.decode(frame)
                except ProtocolError as error:
                    log.warning("bad message from the scheduler: %s", error)
                    continue
                if isinstance(message, Ping):
                    self._silence.heard()
                    self._answers = max(self._answers, message.number)
                if isinstance(message, EndEpoch):
                    self._ended_epoch = message.epoch
                self.is_dismissed |= isinstance(message, Shutdown)
        except (PeerGone, HandshakeRefused) as error:
            self._on_lost(error)

    def _next_frame(self) -> bytes | None:
        with self._connection:
            return self._client.receive_now()
