"""Execution of steps on the runner: forward pass, sampling, and what is sent when one of them fails."""

import logging
from functools import partial

from protocol.codec import unpack
from protocol.steps import GrammarOutput, KeepPins, LoadBlocks, ReleaseSlots, SchedulerOutput
from services.worker.result_sender import LaunchedStep, fault
from services.worker.runner import ModelRunner, OutOfMemory, RanksLost, is_out_of_memory
from services.worker.scheduler_link import SchedulerLink
from services.worker.session import Phase, ResendResult, Session, StepAction
from services.worker.step_queue import SampleStep, StepQueue
from services.worker.tiers.offload import Offload

log = logging.getLogger("runahead.worker")


class StepExecution:
    def __init__(self, runner: ModelRunner, session: Session, link: SchedulerLink, offload: Offload) -> None:
        self._runner, self._session, self._link, self._offload = runner, session, link, offload
        self._queue = StepQueue()
        self._waited = 0.0
        """Seconds spent in receive since the last plan, while no step in the queue waited for its masks."""
        self._received = 0.0
        """When the last plan was read: seconds on the monotonic clock."""
        self._request_ids: dict[int, str] = {}
        """Slot -> external id of the request that entered it last."""

    @property
    def seconds_left(self) -> float:
        """Seconds until `advance` is to be called although no message arrives."""
        return self._queue.seconds_left

    def on_wait(self, seconds: float) -> None:
        """The executing thread has waited so long for a message."""
        if self._session.phase is Phase.SERVING and not self._queue.waits:
            self._waited += seconds

    def act(self, action: StepAction, received: float) -> None:
        """Execute an action, or queue it behind a step that waits for its masks.

        Args:
            received: when the message was read, seconds on the monotonic clock.

        Raises: RanksLost; OutOfMemory. Any other error is sent instead of the step's result.
        """
        if not self._session.collects_masks:
            self._execute(action, received)
            return
        self._queue.put(action, received)
        self._execute_queued()

    def advance(self) -> bool:
        """Sample the step that waits for its masks, if it waits no longer, and execute what waited behind it. Call it
        when all messages that have arrived were read. Return False if nothing was to do.

        Raises: as `act`
        """
        if not self._queue.waits or (sampling := self._queue.next()) is None:
            return False
        self._execute(*sampling)
        self._execute_queued()
        return True

    def drop(self) -> None:
        """Drop the step that waits and what is behind it: the epoch is over, or a step has failed."""
        self._queue = StepQueue()

    def _execute_queued(self) -> None:
        """Execute until a step waits for its masks."""
        while not self._queue.waits and (queued := self._queue.next()) is not None:
            self._execute(*queued)

    def _execute(self, action: StepAction | SampleStep, received: float) -> None:
        executed = action.step if isinstance(action, SampleStep) else action
        step = executed if isinstance(executed, SchedulerOutput) else None
        step_id = self._session.last_step if step is None else step.step_id
        try:
            with self._link.results.may_wait_for_ranks(in_step=True):
                self._run(action, received)
        except RanksLost:
            self.drop()
            raise
        except Exception as error:
            self.drop()
            if is_out_of_memory(error):
                raise OutOfMemory(step_id, error) from None
            requests = "none" if step is None else self._requests_of(step)
            log.exception("step %d failed; its requests: %s", step_id, requests)
            self._link.results.put(fault(self._session.epoch, step_id, error))
            self._session.failed()

    def _run(self, action: StepAction | SampleStep, received: float) -> None:
        match action:
            case SchedulerOutput():
                self._received = received
                self._follow(action)
                for request in action.new:
                    self._request_ids[request.slot] = request.request_id
                self._runner.execute_model(action)
                if not self._queue.waits:
                    self._sample(action, None)
            case SampleStep(grammar, step):
                self._sample(step, grammar)
            case GrammarOutput():
                self._runner.add_masks(action)
            case ResendResult():
                self._link.results.put(action)
            case ReleaseSlots(slots=slots):
                self._follow(action)
                self._runner.release(unpack(slots))
            case LoadBlocks() if action.is_drop:
                self._runner.kv_memory.forget(action)
                self._offload.drop(action, self._runner.kv_memory.keeper)
            case LoadBlocks():
                self._offload.load(action)
            case KeepPins():
                self._runner.kv_memory.pins = action

    def _follow(self, message: SchedulerOutput | ReleaseSlots) -> None:
        """Keep the names of the blocks in memory: they change before the step writes."""
        if (names := self._runner.kv_memory.names) is not None:
            names.follow(message)
            if message.whole is not None:
                self._offload.follow(message.whole)

    def _sample(self, step: SchedulerOutput, grammar: GrammarOutput | None) -> None:
        output, names = self._runner.sample_tokens(grammar), self._runner.kv_memory.names
        requests = partial(self._requests_of, step)
        self._link.results.put(LaunchedStep(step, output, self._received, self._waited, requests, names))
        self._waited = 0.0

    def _requests_of(self, step: SchedulerOutput) -> str:
        """Return the external ids of the requests in a step in flight, for the log."""
        ids = (self._request_ids.get(slot, "") for slot in unpack(step.slots).tolist())
        return ", ".join(request_id or "unnamed" for request_id in ids)
